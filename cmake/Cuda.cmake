# CUDA is optional: W4Q_CUDA=AUTO builds the GPU passes where nvcc is found, ON demands it, OFF leaves them out.
set(W4Q_CUDA AUTO CACHE STRING "Build the CUDA passes: AUTO, ON or OFF")
set_property(CACHE W4Q_CUDA PROPERTY STRINGS AUTO ON OFF)
# sm_89 (RTX 4090) is the product's target. Each architecture holds machine code and PTX, so that a newer GPU can run what a
# 4090 runs (CUDA_FORCE_PTX_JIT=1).
set(W4Q_CUDA_ARCHITECTURES "auto" CACHE STRING
  "GPU architectures to compile for, e.g. 80;89;90; auto: those of this machine's GPUs, 89 where it has none")
# Warpgroup products exist in machine code for sm_90a alone.
set(W4Q_WGMMA AUTO CACHE STRING "Build the warpgroup products: AUTO (where architecture 90 is asked for), ON or OFF")
set_property(CACHE W4Q_WGMMA PROPERTY STRINGS AUTO ON OFF)
# To see that kernels compile where no GPU runs them: hardly optimised, and read by the assembler, which makes machine code of
# one empty kernel alone. What only machine code shows (registers, shared memory of a fixed size) a build for a GPU finds.
option(W4Q_FAST_COMPILED_KERNELS "See that kernels compile, in a fraction of the time; no GPU can run them" OFF)

# Sets `result` to the architectures of this machine's GPUs, or to 89.
function(w4q_architectures_here result)
  set(found 89)
  find_program(W4Q_NVIDIA_SMI nvidia-smi)
  if(W4Q_NVIDIA_SMI)
    execute_process(COMMAND ${W4Q_NVIDIA_SMI} --query-gpu=compute_cap --format=csv,noheader
      OUTPUT_VARIABLE said ERROR_QUIET RESULT_VARIABLE status OUTPUT_STRIP_TRAILING_WHITESPACE)
    if(status EQUAL 0 AND said MATCHES "^[0-9]+\\.[0-9]")
      string(REPLACE "." "" said "${said}")
      string(REPLACE "\n" ";" found "${said}")
      list(REMOVE_DUPLICATES found)
    endif()
  endif()
  set(${result} ${found} PARENT_SCOPE)
endfunction()

set(W4Q_HAVE_CUDA OFF)
if(NOT W4Q_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  # nvcc is often installed without being on PATH.
  find_program(W4Q_NVCC nvcc HINTS ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES bin)
  if(W4Q_NVCC AND NOT CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_COMPILER ${W4Q_NVCC})
  endif()
  if(W4Q_CUDA_ARCHITECTURES STREQUAL "auto")
    w4q_architectures_here(CMAKE_CUDA_ARCHITECTURES)
  else()
    set(CMAKE_CUDA_ARCHITECTURES ${W4Q_CUDA_ARCHITECTURES})
  endif()
  if(W4Q_NVCC)
    check_language(CUDA)
  endif()
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    # The module of CMake 3.25 marks nvToolsExt as deprecated for projects that require 3.25, and fails where CUDA (13) has
    # no such library any more.
    set(required_version ${CMAKE_MINIMUM_REQUIRED_VERSION})
    set(CMAKE_MINIMUM_REQUIRED_VERSION 3.24)
    find_package(CUDAToolkit REQUIRED)
    set(CMAKE_MINIMUM_REQUIRED_VERSION ${required_version})
    # CMake 3.25 does not know that nvcc 12 and newer speak C++20: tell it how.
    if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
    endif()
    set(CMAKE_CUDA_STANDARD 20)
    set(CMAKE_CUDA_EXTENSIONS OFF)
    set(CMAKE_CUDA_FLAGS_RELEASE "-O3")
    set(CMAKE_CUDA_FLAGS_RELWITHDEBINFO "-O3 -lineinfo")
    if(W4Q_FAST_COMPILED_KERNELS)
      list(TRANSFORM CMAKE_CUDA_ARCHITECTURES REPLACE "^([0-9]+a?)$" "\\1-real")
      # The empty kernel, which every file has, and its name as the assembler is told it.
      set(empty_kernel ${PROJECT_BINARY_DIR}/prelude/w4q_empty_kernel.cuh)
      file(CONFIGURE OUTPUT ${empty_kernel} CONTENT "template <int> __global__ void w4q_empty_kernel() {}
template __global__ void w4q_empty_kernel<0>();
")
      string(APPEND CMAKE_CUDA_FLAGS " -include ${empty_kernel} -Xptxas=-e,_Z16w4q_empty_kernelILi0EEvv")
      if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
        string(APPEND CMAKE_CUDA_FLAGS " --Ofast-compile=max")
      endif()
    elseif(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.4)
      string(APPEND CMAKE_CUDA_FLAGS " --compress-mode=size")
    endif()
    if(W4Q_CCACHE AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
      set(CMAKE_CUDA_COMPILER_LAUNCHER ${W4Q_CCACHE})
    endif()
    set(W4Q_HAVE_CUDA ON)
    set(W4Q_HAVE_WGMMA ${W4Q_WGMMA})
    if(W4Q_WGMMA STREQUAL "AUTO")
      set(W4Q_HAVE_WGMMA OFF)
      if(CMAKE_CUDA_ARCHITECTURES MATCHES "(^|;)90(-real)?(;|$)")
        set(W4Q_HAVE_WGMMA ON)
      endif()
    endif()
  elseif(W4Q_CUDA STREQUAL "ON")
    message(FATAL_ERROR "W4Q_CUDA=ON, but no nvcc was found: install the CUDA toolkit or set CUDA_HOME")
  else()
    message(STATUS "no nvcc found: building without the CUDA passes")
  endif()
endif()

target_compile_options(w4q_flags INTERFACE
  # No silent contraction, as on the CPU: bytes must agree. Kernels that want a fused multiply-add say fmaf or use mma.
  $<$<COMPILE_LANGUAGE:CUDA>:--fmad=false -Werror=all-warnings --expt-relaxed-constexpr -Xcompiler=-Wall,-Wextra,-Werror>
  $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<CXX_COMPILER_ID:GNU>,$<VERSION_GREATER_EQUAL:$<CXX_COMPILER_VERSION>,13>>:-Xcompiler=-Wno-dangling-reference>)
