"""Two layouts, the same bits: explicit frames, cells of a grid, and the orders that would show."""
