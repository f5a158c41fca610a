# `anyshard doctor` tells a module that is older than the sources beside it: a hash of what it was
# built from is compiled in. The same as anyshard/cli/stale.py computes.
file(GLOB HASHED CONFIGURE_DEPENDS "${NATIVE}/*.cpp" "${NATIVE}/*.h")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${HASHED})
set(HASHES "")
foreach(FILE IN LISTS HASHED)
  file(SHA256 "${FILE}" HASH)
  get_filename_component(NAME "${FILE}" NAME)
  string(APPEND HASHES "${NAME} ${HASH}\n")
endforeach()
string(SHA256 HASH "${HASHES}")
set_property(
  SOURCE "${NATIVE}/bindings.cpp"
  APPEND PROPERTY COMPILE_DEFINITIONS "ANYSHARD_SOURCES_SHA256=\"${HASH}\"")
