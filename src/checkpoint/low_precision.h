// Checkpoints whose weights are small floats with scales (FP8, MXFP4, NVFP4), read as the weights that they stand for:
// each is decoded when it is loaded, and nothing is written to disk. docs/dialects.md has the tensors.
#pragma once

#include "checkpoint/folder.h"

namespace w4q::checkpoint {

/// Whether quantization_config says so: quant_method fp8, fbgemm_fp8, mxfp4, mxfp8 or modelopt, or a format of
/// compressed-tensors, of AutoRound or of Quark that holds floats; LLM.int8 of bitsandbytes, MLX's folders and ModelOpt's
/// INT4 of AWQ are read the same way.
bool is_low_precision(const io::Json& quantization);

/// The shape of scales without the ones that ModelOpt's blocks have between their sizes: [n/128, 1, k/128, 1].
Shape shape_of_scales(const Shape& stored);

/// The algorithm of a checkpoint of ModelOpt that holds integers other than those of "W4A16_AWQ", of which those of a byte
/// are read: "W4A8_AWQ"; empty: none.
std::string integer_algorithm(const io::Json& quantization);

/// `folder` with F32 matrices "….weight" in the place of codes and scales (experts of stacked MXFP4 one by one,
/// "….down_proj.3.weight"), and without its quantization_config. Kept as it is, such a matrix is stored as BF16. Values are
/// code · scale in fp32, NVFP4's code · (scale / global scale), as the programs that write them define it.
/// Throws bad_file for codes without scales, or scales of another shape or type.
Folder read_low_precision(Folder folder, const StatedQuantization& stated);

}  // namespace w4q::checkpoint
