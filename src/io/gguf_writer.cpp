#include "io/gguf_writer.h"

#include "core/text.h"
#include "io/system.h"

namespace w4q::io {

GgufWriter::GgufWriter(const std::filesystem::path& target, std::vector<PlannedGgufTensor> tensors,
                       GgufMetadata metadata, bool overwrite, const std::vector<std::filesystem::path>& inputs)
    : header_(layout_gguf(std::move(tensors), std::move(metadata))), file_(target, overwrite, inputs) {
  check_free_space(file_.target().parent_path(), header_.file_size());
  const std::string head = serialize_gguf_header(header_);
  write_all(file_.descriptor(), std::as_bytes(std::span(head)), 0, file_.target());
  skip_finished_tensors();
}

void GgufWriter::append(std::string_view name, std::span<const std::byte> part) {
  ensure(tensor_ < header_.tensors.size(), concat("tensor \"", shown(name), "\" is written behind the last one"));
  const GgufTensor& tensor = header_.tensors[tensor_];
  ensure(tensor.name == name, concat("tensor \"", shown(name), "\" is written, \"", shown(tensor.name), "\" is next"));
  ensure(part.size() <= tensor.size - written_, concat("tensor \"", shown(name), "\": more bytes than planned"));
  write_all(file_.descriptor(), part, header_.data_begin + tensor.offset + written_, file_.target());
  hasher_.add(part);
  written_ += part.size();
  skip_finished_tensors();
}

void GgufWriter::skip_finished_tensors() {
  while (tensor_ < header_.tensors.size() && written_ == header_.tensors[tensor_].size) {
    const GgufTensor& tensor = header_.tensors[tensor_++];
    digests_.emplace(tensor.name, hasher_.finish(ggml_type_name(tensor.type), tensor.shape));
    const uint64_t end = header_.data_begin + tensor.offset + tensor.size;
    const uint64_t padded =
        tensor_ < header_.tensors.size() ? header_.data_begin + header_.tensors[tensor_].offset : header_.file_size();
    write_all(file_.descriptor(), std::vector<std::byte>(padded - end), end, file_.target());
    written_ = 0;
  }
}

void GgufWriter::commit() {
  ensure(tensor_ == header_.tensors.size(), "a GGUF file is committed before its last tensor is written");
  file_.commit();
}

}  // namespace w4q::io
