// Linear layers of 9 and more activation rows on sm_90a, an extra beside the kernels for sm_80 and newer: decoded
// weights are the A operand of warpgroup products (docs/kernels/wgmma.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "core/dtype.h"
#include "device/stream.h"
#include "formats/scheme.h"

namespace w4q::kernels::frame {
struct Launch;
}
namespace w4q::kernels::integer {
struct MarlinLaunch;
}

namespace w4q::kernels::wgmma {

/// Whether this build has the kernels. An sm_90 runs them.
bool built() noexcept;

/// Why these kernels do not take weights of k inputs on a GPU; empty where they do.
std::string_view refusal(const device::Properties& gpu, int64_t k);
/// Most rows, given that some number was `measured` to pay beside cuBLAS: without cuBLAS all. Asks for cuBLAS only
/// where `rows` is more.
int64_t most_rows_here(int64_t rows, int64_t measured);

/// Bytes for arranged activations, of at most most_rows_at_once rows, for any number of rows up to `m`.
size_t workspace_bytes(int64_t m, int64_t k);
inline constexpr int64_t most_rows_at_once = 4096;

/// kbit-fragment weights; `launch` with the factors of scaled weights. `arranged` has workspace_bytes(), aligned to
/// 256. Needs built() and an sm_90.
void launch_kbit(const frame::Launch& launch, const formats::Scheme& scheme, DType activation, void* arranged,
                 const device::Stream& stream, std::string_view shape);

/// float-fragment weights with scales of blocks: NVFP4, MXFP4, MXFP8; `launch` with the factors of scaled weights,
/// activations of f16. What launch_kbit() says.
void launch_float(const frame::Launch& launch, const formats::Scheme& scheme, void* arranged,
                  const device::Stream& stream, std::string_view shape);

/// Marlin's int4 words, symmetric, groups of 32 · 2^i or one. What launch_kbit() says.
void launch_marlin(const integer::MarlinLaunch& launch, DType activation, void* arranged, const device::Stream& stream,
                   std::string_view shape);

}  // namespace w4q::kernels::wgmma
