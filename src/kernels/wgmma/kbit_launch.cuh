// The launch of kbit-fragment weights with activations of one type. A file each: they take long to compile.
#pragma once

#include "kernels/kbit/launch.cuh"
#include "kernels/wgmma/decode_kbit.cuh"
#include "kernels/wgmma/launch.cuh"

namespace w4q::kernels::wgmma {

/// launch_kbit() for activations of `Type`.
template <class Type>
void launch_kbit_of(const frame::Launch& launch, const formats::Scheme& scheme, void* arranged,
                    const device::Stream& stream, std::string_view shape) {
  with_table_bits(scheme.bits, [&]<int bits>() {
    with_rows<32, 256>(layer_of(launch), [&]<int rows>(const Layer& part) {
      using Weights = KbitWeights<bits, Type, job_outputs(rows)>;
      const auto source = kbit_source<Weights>(launch, {scheme.scale == formats::ScaleType::e4m4});
      launch_rows<Weights, rows>(source, part, arranged, stream, shape);
    });
  });
}
/// kbit_bf16_cuda.cu
void launch_kbit_bf16(const frame::Launch& launch, const formats::Scheme& scheme, void* arranged,
                      const device::Stream& stream, std::string_view shape);

}  // namespace w4q::kernels::wgmma
