# Headers of the standard library, of JSON and of GoogleTest, parsed once instead of in every file: more than half of what a
# file takes to compile. Every file includes what it uses all the same; a build without this (the preset tidy) finds what is
# missing.
option(W4Q_PRECOMPILE "Precompile the headers of libraries" ON)

set(W4Q_PRELUDE <algorithm> <array> <bit> <cmath> <cstdint> <cstring> <filesystem> <functional> <map> <memory> <numeric>
  <optional> <ranges> <set> <span> <sstream> <string> <string_view> <utility> <vector>
  ${CMAKE_CURRENT_LIST_DIR}/prelude/json.h)

if(W4Q_PRECOMPILE)
  # GCC 12 takes code of precompiled system headers for ours, and warns of bounds that it gets wrong in std::string.
  target_compile_options(w4q_flags INTERFACE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-array-bounds;-Wno-restrict;-Wno-stringop-overflow;-Wno-stringop-overread>)
endif()

# w4q_prelude(NAME LIBRARY|COMMANDS|PROGRAM headers…): a set of headers that targets of this kind share by
# w4q_use_prelude(target NAME). COMMANDS are the part of a program that a library may hold, too, and what libraries have
# that are optimised as programs are. CMake wants a file that is compiled with them, an empty one if there is no SOURCE: its
# object is NAME's.
function(w4q_prelude NAME KIND)
  cmake_parse_arguments(ARG "" "SOURCE" "" ${ARGN})
  if(NOT ARG_SOURCE)
    if(NOT W4Q_PRECOMPILE)
      return()
    endif()
    set(ARG_SOURCE ${PROJECT_BINARY_DIR}/prelude/${NAME}.cpp)
    file(CONFIGURE OUTPUT ${ARG_SOURCE} CONTENT "")
  endif()
  add_library(${NAME} OBJECT ${ARG_SOURCE})
  set(flags w4q_flags)
  if(NOT KIND STREQUAL "LIBRARY")
    set(flags w4q_plain_flags)
  endif()
  target_link_libraries(${NAME} PRIVATE ${flags} OpenMP::OpenMP_CXX nlohmann_json::nlohmann_json)
  if(KIND STREQUAL "PROGRAM")
    set_target_properties(${NAME} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
    target_compile_options(${NAME} PRIVATE -fPIE)
  endif()
  if(W4Q_PRECOMPILE)
    target_precompile_headers(${NAME} PRIVATE ${ARG_UNPARSED_ARGUMENTS})
  endif()
endfunction()

# A program may use those of a library, COMMANDS, if it is compiled as one.
function(w4q_compile_as_library TARGET)
  set_target_properties(${TARGET} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
  target_compile_options(${TARGET} PRIVATE -fPIC)
  target_link_options(${TARGET} PRIVATE -pie)
endfunction()

function(w4q_use_prelude TARGET NAME)
  if(W4Q_PRECOMPILE)
    target_precompile_headers(${TARGET} REUSE_FROM ${NAME})
  endif()
endfunction()
