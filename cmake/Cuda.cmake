# CUDA is optional: W4Q_CUDA=AUTO builds the GPU passes where nvcc is found, ON demands it, OFF leaves them out.
set(W4Q_CUDA AUTO CACHE STRING "Build the CUDA passes: AUTO, ON or OFF")
set_property(CACHE W4Q_CUDA PROPERTY STRINGS AUTO ON OFF)
# sm_89 (RTX 4090) is the product's target. Each architecture holds machine code and PTX, so that a newer GPU can run what a
# 4090 runs (CUDA_FORCE_PTX_JIT=1).
set(W4Q_CUDA_ARCHITECTURES "89" CACHE STRING "GPU architectures to compile for, e.g. 80;89;90")

set(W4Q_HAVE_CUDA OFF)
if(NOT W4Q_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  # nvcc is often installed without being on PATH.
  find_program(W4Q_NVCC nvcc HINTS ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES bin)
  if(W4Q_NVCC AND NOT CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_COMPILER ${W4Q_NVCC})
  endif()
  set(CMAKE_CUDA_ARCHITECTURES ${W4Q_CUDA_ARCHITECTURES})
  if(W4Q_NVCC)
    check_language(CUDA)
  endif()
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    find_package(CUDAToolkit REQUIRED)
    # CMake 3.25 does not know that nvcc 12 and newer speak C++20: tell it how.
    if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
    endif()
    set(CMAKE_CUDA_STANDARD 20)
    set(CMAKE_CUDA_EXTENSIONS OFF)
    set(CMAKE_CUDA_FLAGS_RELEASE "-O3 -lineinfo")
    set(W4Q_HAVE_CUDA ON)
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
