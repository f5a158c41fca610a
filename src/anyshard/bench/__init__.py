"""How fast a model runs here: tests of a whole model, of one block, and of the memory behind them.

`rows.py` times an engine, `bandwidth.py` reads memory beside it, `blocks.py` times the MLP block on
ranks (`block_rank.py`) and beside torch and Gloo (`torch_block.py`, processes of their own),
`tables.py` says it as text, Markdown and CSV.
"""
