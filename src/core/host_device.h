// Marks functions that run on the CPU and, compiled by a CUDA compiler, on the GPU too.
#pragma once

#ifdef __CUDACC__
#define W4Q_HOST_DEVICE __host__ __device__
#else
#define W4Q_HOST_DEVICE
#endif
