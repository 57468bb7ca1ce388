// What config.json says of the model, and of how it was packed.
#include <algorithm>

#include "audit/faults.h"
#include "core/text.h"

namespace w4q::audit {
namespace {

constexpr const char* config_group = "config.json";
constexpr const char* packed_group = "quantization_config";

/// A key that is there, or may be left out, gets another value.
bool set(Subject& s, const char* key, const io::Json& value) {
  s.copy.config[key] = value;
  return true;
}

/// Changes what is said of one packed linear of w4q.
bool change_linear(Subject& s, const std::function<bool(io::Json& entry, Subject&)>& how) {
  const std::string linear = s.linear();
  if (linear.empty() || s.foreign()) return false;
  return how(s.stated()["linears"][linear], s);
}

bool change_pass(Subject& s, const char* key, const std::function<std::string(const std::string&)>& how) {
  return change_linear(s, [&](io::Json& entry, Subject&) {
    io::Json& pass = entry["passes"][0];
    if (!pass.contains(key)) return false;
    const std::string before = pass[key], after = how(before);
    pass[key] = after;
    return before != after;
  });
}

std::string replaced(std::string text, std::string_view from, std::string_view to) {
  const size_t at = text.find(from);
  return at == std::string::npos ? text : text.replace(at, from.size(), to);
}

/// The scheme with something else in the place of the first of `from` that it has.
bool change_scheme(Subject& s, std::initializer_list<std::pair<std::string_view, std::string_view>> from) {
  return change_pass(s, "scheme", [&](const std::string& scheme) {
    for (const auto& [part, other] : from) {
      if (scheme.find(part) != std::string::npos) return replaced(scheme, part, other);
    }
    return scheme;
  });
}

/// All seeds in rotations behind `object[key]`, wherever they stand.
bool other_seed(io::Json& value) {
  if (!value.is_string()) return false;
  std::string text = value;
  const size_t at = text.rfind("-s");
  if (at == std::string::npos) return false;
  value = text.substr(0, at + 2) + std::to_string(std::stoul(text.substr(at + 2)) + 1);
  return true;
}

bool change_rotation(Subject& s, const std::function<bool(io::Json&)>& how) {
  return change_linear(s, [&](io::Json& entry, Subject&) {
    for (io::Json& pass : entry["passes"]) {
      if (pass.contains("rotation") && how(pass["rotation"])) return true;
    }
    return false;
  });
}

bool change_folded(Subject& s, const char* key) {
  return s.copy.config.contains("folded_rotations") && other_seed(s.copy.config["folded_rotations"][key]);
}

}  // namespace

Faults config_faults() {
  return {
      {config_group, "rope_theta is the usual one", [](Subject& s) { return set(s, "rope_theta", 10000.0); }},
      {config_group, "rope_theta is missing", [](Subject& s) { return s.copy.config.erase("rope_theta") == 1; }},
      {config_group, "eps is a thousand times as large", [](Subject& s) { return set(s, "rms_norm_eps", 1e-2); }},
      {config_group, "eps is a tenth", [](Subject& s) { return set(s, "rms_norm_eps", 1e-6); }},
      {config_group, "positions are scaled",
       [](Subject& s) {
         return set(s, "rope_scaling", {{"rope_type", "linear"}, {"factor", 8.0}});
       }},
      {config_group, "half as many heads of twice the width",
       [](Subject& s) {
         for (const char* key : {"num_attention_heads", "num_key_value_heads"}) {
           s.copy.config[key] = s.copy.config[key].get<int64_t>() / 2;
         }
         return set(s, "head_dim", 2 * s.config().head_dim);
       }},
      {config_group, "as many key heads as heads",
       [](Subject& s) { return set(s, "num_key_value_heads", s.config().heads); }},
      {config_group, "a layer fewer", [](Subject& s) { return set(s, "num_hidden_layers", s.config().layers - 1); }},
      {config_group, "a layer more", [](Subject& s) { return set(s, "num_hidden_layers", s.config().layers + 1); }},
      {config_group, "another hidden size",
       [](Subject& s) { return set(s, "hidden_size", 2 * s.config().hidden_size); }},
      {config_group, "another vocabulary size",
       [](Subject& s) { return set(s, "vocab_size", s.config().vocab_size - 1); }},
      {config_group, "the head is tied otherwise",
       [](Subject& s) { return set(s, "tie_word_embeddings", !s.config().tied_embeddings); }},
      {config_group, "another activation", [](Subject& s) { return set(s, "hidden_act", "relu"); }},
      {config_group, "another attention window",
       [](Subject& s) { return s.copy.config.contains("sliding_window") && set(s, "sliding_window", 8); }},
      {config_group, "bos and eos are exchanged",
       [](Subject& s) {
         std::swap(s.copy.config["bos_token_id"], s.copy.config["eos_token_id"]);
         return true;
       }},
      {config_group, "eos is another token", [](Subject& s) { return set(s, "eos_token_id", 7); }},
      {config_group, "fewer positions", [](Subject& s) { return set(s, "max_position_embeddings", 256); }},
      {config_group, "another architecture of the same tensors",
       [](Subject& s) {
         const bool llama = s.copy.config["model_type"] == "llama";
         if (!llama && s.copy.config["model_type"] != "mistral") return false;
         s.copy.config["architectures"] = {llama ? "MistralForCausalLM" : "LlamaForCausalLM"};
         return set(s, "model_type", llama ? "mistral" : "llama");
       }},
      {config_group, "another architecture of other tensors",
       [](Subject& s) {
         const bool qwen = s.copy.config["model_type"] == "qwen3";
         s.copy.config["architectures"] = {qwen ? "LlamaForCausalLM" : "Qwen3ForCausalLM"};
         return set(s, "model_type", qwen ? "llama" : "qwen3");
       }},
      {config_group, "numbers of another model",
       [](Subject& s) {
         set(s, "rope_theta", 1000000.0);
         set(s, "rms_norm_eps", 1e-6);
         set(s, "bos_token_id", 1);
         return set(s, "eos_token_id", 2);
       }},
      {config_group, "seed of the folded rotation of the stream",
       [](Subject& s) { return change_folded(s, "residual"); }},
      {config_group, "seed of the folded rotation of heads", [](Subject& s) { return change_folded(s, "heads"); }},
      {config_group, "folded rotations are not mentioned",
       [](Subject& s) { return s.copy.config.erase("folded_rotations") == 1; }},
      {packed_group, "it is missing", [](Subject& s) { return s.copy.config.erase("quantization_config") == 1; }},
      {packed_group, "a linear is missing",
       [](Subject& s) {
         const std::string linear = s.linear();
         return !linear.empty() && !s.foreign() && s.stated()["linears"].erase(linear) == 1;
       }},
      {packed_group, "a linear has other sizes",
       [](Subject& s) {
         return change_linear(s, [](io::Json& entry, Subject&) {
           std::swap(entry["n"], entry["k"]);
           return entry["n"] != entry["k"];
         });
       }},
      {packed_group, "a linear has another group size",
       [](Subject& s) {
         return change_scheme(s, {{"-g128", "-g64"},
                                  {"-g64", "-g32"},
                                  {"-g32", "-g64"},
                                  {"-d128", "-d64"},
                                  {"-d64", "-d128"},
                                  {"-row", "-g128"},
                                  {"-b64", "-b128"},
                                  {"-b128", "-b64"}});
       }},
      {packed_group, "a linear has another width",
       [](Subject& s) {
         return change_scheme(s, {{"int4", "int3"},
                                  {"int8", "int4"},
                                  {"int", "int1"},
                                  {"kbit4", "kbit3"},
                                  {"kbit3", "kbit4"},
                                  {"kbit", "kbit1"},
                                  {"rotated4", "rotated3"},
                                  {"rotated3", "rotated4"}});
       }},
      {packed_group, "a linear has scales of another type",
       [](Subject& s) {
         return change_scheme(s, {{"bf16", "f16"}, {"f16", "bf16"}, {"e4m4", "f16"}});
       }},
      {packed_group, "a linear has another family",
       [](Subject& s) {
         return change_scheme(s, {{"kbit", "rotated"}, {"rotated", "kbit"}});
       }},
      {packed_group, "a linear has another layout",
       [](Subject& s) {
         return change_pass(s, "layout", [](const std::string& layout) {
           return layout == "canonical" ? "interleaved" : layout == "marlin" ? "awq" : "canonical";
         });
       }},
      {packed_group, "zero points are not mentioned",
       [](Subject& s) {
         return change_scheme(s, {{"-asym", ""}});
       }},
      {packed_group, "act order is not mentioned",
       [](Subject& s) {
         return change_scheme(s, {{"-actorder", ""}});
       }},
      {packed_group, "seed of a rotation", [](Subject& s) { return change_rotation(s, other_seed); }},
      {packed_group, "width of a rotation",
       [](Subject& s) {
         return change_rotation(s, [](io::Json& rotation) {
           const std::string before = rotation;
           rotation = replaced(before, before.find("hadamard128") == 0 ? "hadamard128" : "hadamard-row", "hadamard64");
           return rotation != before;
         });
       }},
      {packed_group, "a rotation is not mentioned",
       [](Subject& s) {
         return change_linear(s, [](io::Json& entry, Subject&) { return entry["passes"][0].erase("rotation") == 1; });
       }},
      {packed_group, "a rotation where there is none",
       [](Subject& s) {
         return change_linear(s, [](io::Json& entry, Subject& subject) {
           if (entry["passes"][0].contains("rotation")) return false;
           entry["passes"][0]["rotation"] = "hadamard128-s42";
           subject.stated()["format_version"] = 2;
           return true;
         });
       }},
      {packed_group, "an input scale is not mentioned",
       [](Subject& s) {
         for (const auto& linear : s.linears()) {
           if (!s.foreign() && s.stated()["linears"][linear].erase("input_scale") == 1) return true;
         }
         return false;
       }},
      {packed_group, "a further pass is not mentioned",
       [](Subject& s) {
         return change_linear(s, [](io::Json& entry, Subject&) {
           if (entry["passes"].size() < 2) return false;
           entry["passes"].erase(1);
           return true;
         });
       }},
      {packed_group, "what was rescaled is not mentioned",
       [](Subject& s) { return !s.foreign() && s.stated().erase("rescaled") == 1; }},
      {packed_group, "something is said to be rescaled",
       [](Subject& s) {
         if (s.foreign() || s.stated().contains("rescaled")) return false;
         s.stated()["rescaled"] = {s.pick(s.kept())};
         return true;
       }},
      {packed_group, "a newer version of the format",
       [](Subject& s) {
         if (s.foreign()) return false;
         s.stated()["format_version"] = 9;
         return true;
       }},
  };
}

}  // namespace w4q::audit
