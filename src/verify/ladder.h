// The ladder of verification as a table: which checks there are, in which order they are climbed, what each needs and
// which of them end the climb. A command line makes its options of the rows; whoever has a checkpoint can climb them.
#pragma once

#include <cmath>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "chat/chat_text.h"
#include "checkpoint/folder.h"
#include "io/json.h"
#include "model/kinds.h"
#include "model/model.h"
#include "verify/decoder.h"
#include "verify/perplexity.h"
#include "verify/report.h"
#include "verify/speed.h"

namespace w4q::verify {

/// What to climb for.
struct CheckOptions {
  std::filesystem::path model;
  std::filesystem::path base = {};   ///< the 16-bit checkpoint it was made from; empty: none
  std::filesystem::path given = {};  ///< what `model` was made of, where that is a GGUF file; empty: `model` itself
  bool residual = true;              ///< with the passes of the sidecar
  std::filesystem::path text = {};   ///< UTF-8 to decode; empty: none
  std::filesystem::path ids = {};    ///< the same as token ids
  chat::ChatFile chat = {};          ///< the same as conversations, by the chat template of `model`
  PerplexityOptions windows = {};    ///< of the text
  bool int8_activations = false;     ///< of whatever multiplies
  float compared_delta = INFINITY;   ///< --kv-compare: of another fp4r, which skips pages
  SpeedOptions speed = {};
  model::Detail detail = model::Detail::kinds;    ///< of tables in the text
  DecodeRows decode_rows = kernels::decode_rows;  ///< what is held against the definition: a test may pass a wrong one
  std::string device = "auto";                    ///< the word of --device
  std::shared_ptr<device::Context> gpu = {};      ///< of checks that need one: open_gpu
  /// Puts device, cache and residual bytes into the options of decoding when a check decodes: throws where they are not
  /// to be had. Nothing: as `windows` says. `gpu`, where it is open, is taken in any case.
  std::function<void(PerplexityOptions&)> choose_device = {};
  std::map<std::string, std::string, std::less<>> asked = {};  ///< options of rows: their values, empty for flags
  std::map<std::string, double, std::less<>> limits = {};      ///< by option
  bool default_limits = true;  ///< what checks hold against where no limit of theirs is given

  bool has_base() const noexcept { return !base.empty(); }
  bool has_text() const noexcept { return !text.empty() || !ids.empty() || !chat.empty(); }
};

struct PackedSurvey;

/// What the checks look at. Everything is opened and loaded where a check asks for it first, and once.
class CheckContext {
 public:
  explicit CheckContext(CheckOptions options) : options_(std::move(options)) {}

  const CheckOptions& options() const noexcept { return options_; }
  /// The value of an option that was asked for.
  const std::string& value(std::string_view option) const { return options_.asked.find(option)->second; }
  std::optional<double> limit(std::string_view option) const;
  /// Whether another program wrote it.
  bool foreign();
  /// Whether the base's weights can be held against the candidate's: rotations of other programs are not undone.
  bool holds_base();
  /// The candidate's headers, whatever its config says of them: what is packed is not read yet.
  const checkpoint::Folder& headers();
  /// The base's likewise. Needs has_base().
  checkpoint::Folder base_headers() const;
  const model::OpenedModel& candidate();
  /// With the rotations that the candidate has folded in folded into it too. Needs has_base().
  const model::OpenedModel& base();
  /// What the base holds and a GGUF file has no place for, by name; after base().
  const std::vector<std::string>& left_out() const noexcept { return left_out_; }
  /// For whoever reads canonical planes; `stored`: for decoders on a GPU. Where several processes hold it together, what
  /// belongs to this one.
  const model::Model& model(model::Planes planes = model::Planes::canonical, const model::LayerStage& stage = {});
  /// As it is stored, not folded as the candidate is. Needs has_base().
  const model::Model& base_model(model::Planes planes = model::Planes::canonical, const model::LayerStage& stage = {});
  /// Of the text. Needs has_text().
  const std::vector<int32_t>& ids();
  /// What the rung of codes collected of them on its way; null: it was not climbed, or found faults.
  PackedSurvey* survey() noexcept { return survey_.get(); }
  void keep(std::shared_ptr<PackedSurvey> survey) noexcept { survey_ = std::move(survey); }

 private:
  const io::Json& config();
  const model::OpenedModel& stored_base();
  void stack_base_alike();

  CheckOptions options_;
  std::optional<bool> foreign_, turned_;
  std::optional<io::Json> config_;
  std::optional<checkpoint::Folder> headers_;
  std::optional<model::OpenedModel> candidate_, stored_base_, folded_base_;
  std::vector<std::string> left_out_;
  using Models = std::map<std::pair<model::Planes, int>, model::Model>;  // by the number of stages
  Models models_, base_models_;
  std::optional<std::vector<int32_t>> ids_;
  std::shared_ptr<PackedSurvey> survey_;
};

/// What a climb found, for the two ways of printing it.
struct Findings {
  Report checks;
  std::string text;
  io::Json json = io::Json::object();

  void note(const std::string& what);
  /// A report in both ways; the JSON stands under `key`.
  void add(const std::string& key, const std::string& table, io::Json values);
};

/// What a check works on. An option is refused where it is not there; a row without one is climbed where it is.
struct Needs {
  bool base = false;
  bool text = false;
  bool gpu = false;
  bool packed = false;   ///< packed weights in the candidate
  bool foreign = false;  ///< a candidate of another program
};

/// A number that fails a check.
struct Limit {
  std::string_view option, help;
  bool base = false;  ///< compares with it
};

struct CheckRow {
  std::string_view name;         ///< "kv-compare"
  std::string_view option = {};  ///< "--kv-compare"; empty: always climbed where what it needs is there
  std::string_view value = {};   ///< of the option, for example: "ref.safetensors"; empty: a flag
  std::string_view help;         ///< one line: of the option, or what must hold
  bool several = false;          ///< the option may be given several times: values joined by commas
  bool alone = false;            ///< it reads headers: where nothing else is asked for, nothing else is climbed
  std::span<const Limit> limits = {};
  Needs needs = {};
  bool stops = false;   ///< the climb ends behind it when anything has failed …
  bool aside = false;   ///< … but this: what does not hold here says nothing of what stands on it
  bool shared = false;  ///< ranks share its work; any other check is the first rank's alone
  /// Throws what opening and decoding throw; what does not hold is a finding.
  void (*run)(CheckContext&, Findings&);
};

/// In the order of climbing.
std::span<const CheckRow> ladder();

/// Whether headers are all that was asked for: then nothing else is climbed, and a GGUF file is read as it is.
bool reads_headers_alone(const CheckOptions& options);

/// Refuses options that lack what they need. Throws bad_argument.
void check_needs(const CheckOptions& options);
/// Whether a check is asked for that measures a GPU.
bool needs_gpu(const CheckOptions& options);
/// Opens the GPU where one is asked for. Throws bad_argument where the device is the CPU, device where it cannot be used.
void open_gpu(CheckOptions& options);

/// Climbs as far as the checks hold; the verdict stands last, in text and JSON.
Findings climb(CheckContext& context);

}  // namespace w4q::verify
