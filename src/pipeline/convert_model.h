// A packed checkpoint becomes another dialect's, linear by linear, with proof: what was written is decoded again and
// compared with what was read.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "core/views.h"
#include "formats/integer_recast.h"
#include "io/checkpoint_writer.h"
#include "io/json.h"
#include "pipeline/activation_scales.h"
#include "pipeline/gguf_rows.h"
#include "pipeline/plan.h"
#include "pipeline/sharing.h"
#include "serving/stored_model.h"

namespace w4q::pipeline {

struct ConvertRequest {
  std::filesystem::path input;  ///< a packed checkpoint of w4q in any layout, or of any dialect
  std::filesystem::path output;
  std::string to;  ///< "w4q": canonical planes; or a dialect's name
  /// Round anew what the dialect cannot say, and report the error, instead of refusing.
  bool allow_lossy = false;
  /// Groups in the order of inputs, whatever the dialect could say: linears with act order are rounded anew.
  bool no_act_order = false;
  /// Scales of activations to measure and write, for dialects that have them.
  ActivationRequest activations = {};
  io::WriteOptions write = {};
  bool overwrite = false;
  Sharing sharing = {};  ///< with other ranks, and with a run that was ended
};

/// The names that `to` may have.
std::vector<std::string> convert_targets();

/// One packed linear.
struct ConvertedLinear {
  std::string name;
  formats::Scheme from, to;
  Shape shape;
  int64_t bytes_before = 0, bytes_after = 0;
  std::string loses;           ///< what had to be rounded anew, and why; empty: nothing
  formats::RecastProof proof;  ///< what was read against what was written
  ConversionError error;       ///< where something is lost: of the decoded weights
};

struct ConvertReport {
  std::string from, to;  ///< dialects
  std::vector<ConvertedLinear> linears;
  int64_t carried = 0;        ///< tensors carried along
  int64_t carried_bytes = 0;  ///< their size
  std::vector<std::string> notes;
  bool done = false;
  int64_t file_bytes = 0;
  double seconds = 0;

  formats::RecastProof proof() const;
};

/// What convert_model would do; reads no codes and writes nothing. What depends on values is not known yet.
ConvertReport plan_convert(const ConvertRequest& request);

/// The headers and config.json that convert_model would leave, for whoever asks what loads them.
serving::StoredModel planned_headers(const ConvertRequest& request);
/// The same of what a plan packs of the model in a folder, converted to `to` with scales of activations as they are asked
/// for. Throws as convert_model would for what shapes and schemes alone tell.
serving::StoredModel planned_headers(const Plan& plan, const std::filesystem::path& model, const std::string& to,
                                     const ActivationRequest& activations = {});

/// Throws bad_argument for an unknown `to`, bad_file for a damaged input, unsupported naming the linear and what would
/// be lost, internal when the proof fails.
ConvertReport convert_model(const ConvertRequest& request);

std::string to_text(const ConvertReport& report, model::Detail detail = model::Detail::kinds);
io::Json to_json(const ConvertReport& report);

}  // namespace w4q::pipeline
