// Rules on rows and values of tensors beside those of their role.
#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <set>

#include "core/parallel.h"
#include "core/text.h"
#include "model/parameters.h"
#include "verify/hollow.h"
#include "verify/names.h"
#include "verify/rungs.h"
#include "verify/weights/tensor_rows.h"

namespace w4q::verify {
namespace {

/// Others of its role that must be otherwise; and at most one in so many is named.
constexpr int64_t fewest_peers = 4;

/// Tables of tokens have rows for tokens that are to come.
bool is_table(const io::TensorInfo& info) {
  const auto module = model::module_path(info.name);
  return model::is_embedding(module) || model::is_head(module);
}

/// What may be anything: orders, masks, positions, zero points, tables of biases.
bool is_checked(const io::TensorInfo& info) {
  return !has_part(info.name, {"g_idx", "group_index", "mask", "perm", "zero", "inv_freq", "pos_emb", "position",
                               "tables", "relative", "lora", "codebook", "quant_map", "rotary"});
}

/// Of towers, adapters and layers for further tokens.
bool is_beside_text(std::string_view name) {
  return has_part(name, {"vis", "image", "audio", "speech", "encoder", "adapter", "draft", "mtp", "nextn", "cross"});
}

bool holds_weights(const io::TensorInfo& info) {
  return has_part(info.name, {"weight", "_proj", "experts"}) && !has_part(info.name, {"scale", "absmax", "bias"});
}

std::string lines_text(int64_t begin, int64_t end, int64_t all) {
  return concat("rows ", begin, " to ", end - 1, " of ", all);
}

class RowsCheck {
 public:
  explicit RowsCheck(const io::Checkpoint& tensors) : tensors_(tensors) {
    std::vector<const io::TensorInfo*> infos;
    for (const auto& [name, info] : tensors.tensors()) {
      if (is_checked(info)) infos.push_back(&info);
    }
    all_.resize(infos.size());
    parallel_for(std::ssize(infos), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const auto at = static_cast<size_t>(i);
        all_[at] = tensor_lines(tensors, *infos[at]);
      }
    });
    for (const auto& tensor : all_) roles_[tensor.role].push_back(&tensor);
  }

  Check run() {
    for (const auto& [role, tensors] : roles_) look_at_role(tensors);
    look_at_tables();
    look_at_bytes();
    Check check{"rows", faults_.empty(), {}, std::move(faults_)};
    check.detail = concat(all_.size(), " tensors; ", check.faults.size(), " faults");
    return check;
  }

 private:
  using Role = std::vector<const TensorLines*>;

  void fault(const TensorLines& tensor, const std::string& what) {
    if (named_.insert(tensor.info->name).second) faults_.push_back(concat(printable(tensor.info->name), ": ", what));
  }

  /// Names those of a role that have something where nearly all others have nothing of it.
  template <class Has, class None, class What>
  void few_of(const Role& role, Has has, None none, What what) {
    std::vector<const TensorLines*> found;
    int64_t others = 0;
    for (const auto* tensor : role) {
      if (has(*tensor)) {
        found.push_back(tensor);
      } else if (none(*tensor)) {
        ++others;
      }
    }
    const auto all = std::ssize(role);
    if (found.empty() || others < fewest_peers || others + std::ssize(found) < all) return;
    if (4 * std::ssize(found) > all) return;
    for (const auto* tensor : found) fault(*tensor, what(*tensor));
  }

  void look_at_role(const Role& role) {
    if (role.empty() || !holds_weights(*role.front()->info)) return;
    if (role.front()->lines > 0 && !is_table(*role.front()->info)) {
      zero_lines(role);
      zero_role(role);
      zero_expert(role);
      halves_of_all(role);
      repeated_lines(role);
      taken_lines(role);
    }
    values(role);
  }

  /// What was not written to its end. Channels that were taken out, or are to come, stand so in more than one layer.
  void zero_lines(const Role& role) {
    const auto least = [](const TensorLines& t) { return std::max<int64_t>(8, t.lines / 256); };
    const auto missing = [](const TensorLines& t) { return std::max(t.head, t.tail); };
    few_of(
        role, [&](const TensorLines& t) { return missing(t) >= least(t) && t.head + t.tail < t.lines; },
        [&](const TensorLines& t) { return t.head + t.tail == 0 || t.head == t.lines; },
        [&](const TensorLines& t) {
          const int64_t begin = t.tail >= t.head ? t.lines - t.tail : 0;
          return concat(lines_text(begin, begin + missing(t), t.lines),
                        " are zero, as in no other of its role: it was not written to its end");
        });
    constexpr size_t fewest_bytes = 64;
    few_of(
        role,
        [](const TensorLines& t) { return t.zero_columns >= fewest_bytes && 16 * t.zero_columns >= t.line_bytes; },
        [](const TensorLines& t) { return t.zero_columns < sizeof(uint64_t); },
        [](const TensorLines& t) {
          return concat("the last ", t.zero_columns, " of ", t.line_bytes,
                        " bytes of each row are zero, as in no other of its role");
        });
  }

  /// Experts that were taken out of a model are several.
  void zero_expert(const Role& role) {
    const auto is_nothing = [](const TensorLines* t) { return t->head == t->lines; };
    const auto found = std::ranges::find_if(role, is_nothing);
    constexpr std::ptrdiff_t fewest = 8;
    if (std::ssize(role) < fewest || std::ranges::count_if(role, is_nothing) != 1) return;
    if ((*found)->info->name.find(".experts.") != std::string::npos)
      fault(**found, "is zero throughout, as no other expert of the model is");
  }

  /// A layer may do nothing, as one that was added and not yet trained; no part of all of them does.
  void zero_role(const Role& role) {
    const std::string& name = role.front()->info->name;
    const bool in_layers = name.find("layers.") != std::string::npos && !is_beside_text(name);
    const auto is_nothing = [](const TensorLines* t) { return t->head == t->lines; };
    if (!in_layers || std::ssize(role) < fewest_peers || !std::ranges::all_of(role, is_nothing)) return;
    if (is_hollow(tensors_)) return;
    for (const auto* tensor : role) fault(*tensor, "is zero throughout, as all of its role are: it was never loaded");
  }

  /// Keys and values may be those of several heads that were one; nothing else is the same twice in all layers.
  void halves_of_all(const Role& role) {
    const std::string& name = role.front()->info->name;
    if (std::ssize(role) < fewest_peers || has_part(name, {"k_proj", "v_proj", "kv", "key", "value"})) return;
    // Codes of EXL3: of 64 inputs, which stand before as many zeros, a rotation of 128 makes the same twice.
    if (name.ends_with(".trellis") || name.ends_with(".codes")) return;
    const auto twice = [](const TensorLines* t) { return t->second_half_is_first || t->halves_repeat; };
    if (!std::ranges::all_of(role, twice)) return;
    for (const auto* tensor : role) {
      fault(*tensor,
            concat("the second half of ", tensor->halves_repeat ? "each row" : "its rows",
                   " is the first half again, in all of its role: the part of one of two ranks was stored twice"));
    }
  }

  /// A part of a matrix that was put in the place of another, as of the first of several ranks. Codes of inputs that say
  /// next to nothing beside their group's are alike, too, at any distance.
  void repeated_lines(const Role& role) {
    few_of(
        role, [](const TensorLines& t) { return 4 * t.at_one_distance >= t.lines; },
        [](const TensorLines& t) { return 64 * t.repeated <= t.lines; },
        [](const TensorLines& t) {
          return concat(t.repeated, " of ", t.lines, " rows stand there already, row ", t.first_again, " is row ",
                        t.again_of, " again, as in no other of its role");
        });
    few_of(
        role, [](const TensorLines& t) { return t.halves_repeat; },
        [](const TensorLines& t) { return !t.halves_repeat; },
        [](const TensorLines&) {
          return std::string("the second half of each row is the first half again, as in no other of its role");
        });
  }

  // ---- lines of another tensor ----

  bool same_line(const TensorLines& a, const TensorLines& b, int64_t at) const {
    const auto i = static_cast<size_t>(at);
    return a.keys[i] != 0 && a.keys[i] == b.keys[i];
  }

  /// A buffer that was written twice: from one row on, or up to it, the rows of another layer, the others its own.
  void taken_lines(const Role& role) {
    constexpr int64_t samples = 16, fewest = 3;
    std::map<std::pair<int64_t, uint64_t>, std::vector<size_t>> holders;
    const auto place = [&](const TensorLines& t, int64_t i) { return i * (t.lines - 1) / (samples - 1); };
    for (size_t at = 0; at < role.size(); ++at) {
      for (int64_t i = 0; i < samples && role[at]->lines >= 2 * samples; ++i) {
        const auto key = role[at]->keys[static_cast<size_t>(place(*role[at], i))];
        if (key != 0) holders[{i, key}].push_back(at);
      }
    }
    std::map<std::pair<size_t, size_t>, std::vector<int64_t>> shared;
    for (const auto& [key, who] : holders) {
      for (size_t i = 1; i < who.size(); ++i) shared[{who[i - 1], who[i]}].push_back(key.first);
    }
    for (auto& [pair, places] : shared) {
      const auto &one = *role[pair.first], &other = *role[pair.second];
      const auto count = std::ssize(places);
      if (one.info->shape != other.info->shape || count < fewest || count > samples - fewest) continue;
      std::ranges::sort(places);
      const bool at_end = places.back() == samples - 1, in_a_row = places.back() - places.front() + 1 == count;
      if (!in_a_row || (!at_end && places.front() != 0)) continue;
      int64_t same = 0;
      for (int64_t at = 0; at < one.lines; ++at) same += same_line(one, other, at);
      const int64_t begin = at_end ? one.lines - same : 0;
      // Rows that training did not move are as many in every part.
      bool whole = true;
      for (int64_t at = begin; at < begin + same; ++at) whole = whole && same_line(one, other, at);
      if (!whole) continue;
      fault(other, concat(lines_text(begin, begin + same, one.lines), " are those of ", printable(one.info->name),
                          ", and no other is: one of the two was written in part"));
    }
  }

  // ---- values ----

  void values(const Role& role) {
    constexpr double one_sign = 0.02;
    constexpr size_t few_kinds = 32;
    const auto of_one_sign = [](const TensorLines& t) { return t.negative < one_sign || t.negative > 1 - one_sign; };
    if (role.front()->lines == 0 || is_table(*role.front()->info)) return;
    few_of(
        role, [&](const TensorLines& t) { return t.kinds > 1 && of_one_sign(t); },
        [&](const TensorLines& t) { return t.kinds > 1 && !of_one_sign(t); },
        [](const TensorLines& t) {
          return concat(t.negative < one_sign ? "no" : "every",
                        " value is negative, others of its role have both signs");
        });
    few_of(
        role, [](const TensorLines& t) { return t.kinds > 1 && t.kinds <= few_kinds; },
        [](const TensorLines& t) { return t.kinds == many_kinds; },
        [](const TensorLines& t) {
          return concat("has ", t.kinds, " different values, others of its role have very many: codes without scales");
        });
    constexpr double many_ends = 0.05, few_ends = 0.005;
    few_of(
        role, [](const TensorLines& t) { return t.at_end > many_ends && t.kinds == many_kinds; },
        [](const TensorLines& t) { return t.at_end < few_ends; },
        [](const TensorLines& t) {
          return concat(
              fixed(100 * t.at_end, 1),
              " % of its values are as large as its largest, of others of its role next to none: it was cut off");
        });
    few_of(
        role, [](const TensorLines& t) { return t.stuck_bit >= 0; },
        [](const TensorLines& t) { return t.stuck_bit < 0; },
        [](const TensorLines& t) {
          return concat("bit ", t.stuck_bit, " of every 64th value, from value ", t.stuck_lane,
                        " on, never changes: that of a line of memory is stuck");
        });
  }

  // ---- tables of tokens ----

  void look_at_tables() {
    const auto is_whole = [](const TensorLines& t) { return is_table(*t.info) || t.lines == 0 || t.zero_columns < 8; };
    const bool whole = std::ranges::all_of(all_, is_whole);
    int64_t signs = 0, matrices = 0;
    for (const auto& t : all_) {
      if (is_table(*t.info) || !holds_weights(*t.info) || t.lines == 0 || t.kinds < many_kinds) continue;
      ++matrices, signs += t.negative > 0.1 && t.negative < 0.9;
    }
    for (const auto& t : all_) {
      if (!is_table(*t.info) || t.lines == 0) continue;
      const bool rows = t.info->name.ends_with(".weight") && is_weight_dtype(t.info->dtype);
      if (rows && t.head == t.lines && !is_beside_text(t.info->name) && !is_hollow(tensors_))
        fault(t, "is zero throughout: it was never loaded");
      if (t.second_half_is_first)
        fault(t, "the second half of its rows is the first half again: one part was stored twice");
      if (whole && 16 * t.zero_columns >= t.line_bytes) {
        fault(t, concat("the last ", t.zero_columns, " of ", t.line_bytes,
                        " bytes of each row are zero, and nothing that is read with it ends so"));
      }
      const bool one_sign = t.kinds == many_kinds && (t.negative < 0.001 || t.negative > 0.999);
      if (one_sign && signs == matrices)
        fault(t, concat(t.negative < 0.5 ? "no" : "every", " value is negative, all matrices have both signs"));
    }
  }

  // ---- bytes ----

  /// Of the right type and order values differ by little beside what exponents can say.
  void look_at_bytes() {
    constexpr double wide = 4, narrow = 1.75, times = 4;
    for (const auto& t : all_) {
      const bool weights = holds_weights(*t.info);
      if (t.spread > wide && t.swapped > 0 && t.swapped < narrow && t.spread > times * t.swapped) {
        fault(t, concat("its values lie ", fixed(2 * t.spread, 0), " powers of two apart, with the bytes of each in ",
                        "the other order ", fixed(2 * t.swapped, 1), ": they were not turned"));
      }
      if (t.addresses_end > t.addresses_begin)
        fault(t, concat("holds addresses of a program from byte ", t.addresses_begin, " to ", t.addresses_end,
                        ": memory that nobody wrote to"));
      const size_t lost = t.lost_end - t.lost_begin;
      if (!weights || t.lines == 0 || lost == 0 || 4 * lost > static_cast<size_t>(t.lines) * t.line_bytes) continue;
      const bool lines = t.lost_begin % t.line_bytes < 8 && t.lost_end % t.line_bytes < 8;
      if (!lines && !is_words_by_input(*t.info))
        fault(t, concat("holds zeros from byte ", t.lost_begin, " to ", t.lost_end,
                        ", and nowhere else as many as 16: a sector was lost"));
    }
  }

  /// Of GPTQ's and AWQ's words zero is a code of its own.
  static bool is_words_by_input(const io::TensorInfo& info) { return info.name.ends_with("qweight"); }

  const io::Checkpoint& tensors_;
  std::vector<TensorLines> all_;
  std::map<std::string, Role> roles_;
  std::set<std::string> named_;
  std::vector<std::string> faults_;
};

}  // namespace

Check check_rows(const checkpoint::Folder& headers) { return RowsCheck(headers.tensors).run(); }

CheckRow rows_check() {
  return {.name = "rows",
          .help = "no rows of a matrix stand twice or were left out, and its values are as those of its role",
          .run = [](CheckContext& context, Findings& findings) {
            auto check = check_rows(context.headers());
            // Said where it fails: what is sound says so by all other rungs.
            if (!check.passed) findings.checks.add(std::move(check));
          }};
}

}  // namespace w4q::verify
