# Language level, warnings and optimisation: the same for every target of the project.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set_property(GLOBAL PROPERTY USE_FOLDERS ON)

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()
set(W4Q_OPTIMIZE 2 CACHE STRING
  "How far the C++ of a release is optimised: 2, or 1 for half of the time of compiling less, without lines for debuggers, or g: loops that Highway compiles alone")
set_property(CACHE W4Q_OPTIMIZE PROPERTY STRINGS 2 1 g)
if(W4Q_OPTIMIZE MATCHES "^[1g]$")
  set(CMAKE_CXX_FLAGS_RELEASE "-O1")
  set(W4Q_PLAIN_OPTIMIZE g)  # compiled sooner than with 0, since what is inlined need not be written out
else()
  set(CMAKE_CXX_FLAGS_RELEASE "-O${W4Q_OPTIMIZE} -g1")
  set(W4Q_PLAIN_OPTIMIZE 1)
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # An eighth of GCC's time goes to collecting garbage that fits into memory: it waits until there is 1 GiB of it.
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:--param=ggc-min-heapsize=1048576>)
endif()

add_library(w4q_flags INTERFACE)
target_compile_options(w4q_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Wnon-virtual-dtor -Woverloaded-virtual -Werror>
  # Of files compiled together (cmake/Unity.cmake) a name local to one may hide in another what is local there, and what is
  # local to one is in another's eyes included.
  $<$<COMPILE_LANGUAGE:CXX>:$<IF:$<BOOL:$<TARGET_PROPERTY:UNITY_BUILD>>,-Wno-subobject-linkage,-Wshadow>>
  # GCC 13 takes every function that is given a temporary and returns a reference for one that returns it.
  $<$<AND:$<COMPILE_LANG_AND_ID:CXX,GNU>,$<VERSION_GREATER_EQUAL:$<CXX_COMPILER_VERSION>,13>>:-Wno-dangling-reference>
  # Bytes of a quantized model must not depend on what the compiler fuses: no contraction anywhere.
  $<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off>)

# Tests and the command line are compiled longer than they run: it is the libraries that must be quick. With W4Q_OPTIMIZE=1
# the same holds for the modules without loops over weights (PLAIN in their w4q_module), with g for all of them.
add_library(w4q_plain_flags INTERFACE)
target_link_libraries(w4q_plain_flags INTERFACE w4q_flags)
target_compile_options(w4q_plain_flags INTERFACE $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CONFIG:Release>>:-O${W4Q_PLAIN_OPTIMIZE}>)
if(W4Q_PLAIN_OPTIMIZE STREQUAL "g")
  # It does not look far enough to tell what is always set; a release does.
  target_compile_options(w4q_plain_flags INTERFACE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-maybe-uninitialized>)
endif()

# Loops are compiled for several instruction sets, of which a machine takes one. On x86 those whose best is SSSE3 are of 2006
# and 2007: they take the least.
set(W4Q_SIMD ALL CACHE STRING
  "Instruction sets of loops: ALL, NEW: the least, AVX2 and AVX-512, or HERE: the least and the best of this machine")
set_property(CACHE W4Q_SIMD PROPERTY STRINGS ALL NEW HERE)
set(W4Q_SIMD_OPTION)  # of the files that Highway compiles
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
  set(without HWY_SSSE3)
  if(NOT W4Q_SIMD STREQUAL "ALL")
    list(APPEND without HWY_SSE4)
  endif()
  if(W4Q_SIMD STREQUAL "HERE" AND EXISTS /proc/cpuinfo)
    file(STRINGS /proc/cpuinfo flags REGEX "^flags.* avx2" LIMIT_COUNT 1)
    if(flags MATCHES " avx512vl")
      list(APPEND without HWY_AVX2)
    elseif(flags)
      list(APPEND without HWY_AVX3)
    endif()
  endif()
  list(JOIN without "|" without)
  set(W4Q_SIMD_OPTION "-DHWY_DISABLED_TARGETS=(${without})")
endif()

if(W4Q_SANITIZE)
  add_compile_options(-fsanitize=${W4Q_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${W4Q_SANITIZE})
endif()

find_program(W4Q_CCACHE ccache)
if(W4Q_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # It refuses precompiled headers unless it is told that they hold no time of compilation. What a file depends on the compiler
  # says itself: a file that is not there yet is not preprocessed for it.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros CCACHE_DEPEND=1 ${W4Q_CCACHE})
endif()
