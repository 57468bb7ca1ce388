// Reading the config objects of dialects, which spell one thing in several ways.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "checkpoint/dialect/dialect.h"

namespace w4q::checkpoint {

/// The value of the first of `keys` that is there and not null; `fallback` where none is. Throws bad_file naming place
/// and key when the value is of another kind, or outside least … most.
int64_t config_integer(const DialectSource& source, std::initializer_list<const char*> keys, int64_t fallback,
                       int64_t least, int64_t most);
bool config_flag(const DialectSource& source, std::initializer_list<const char*> keys, bool fallback);
std::string config_text(const DialectSource& source, std::initializer_list<const char*> keys,
                        std::string_view fallback);

/// The object of overrides at `key`, of at most 10,000 of them; null where none is there. Throws bad_file likewise.
const io::Json* config_overrides(const DialectSource& source, const char* key);

/// Whose words AutoRound's config says that its linears have: "gptq" or "awq"; empty: it is not AutoRound's, or its
/// weights are no integers.
std::string auto_round_words(const DialectSource& source);

/// Scheme::block of a key group_size: −1, 0, null and nothing mean whole rows.
int config_group(const DialectSource& source, std::initializer_list<const char*> keys);
/// The reverse: −1 for whole rows.
int group_size_of(const formats::Scheme& scheme) noexcept;

}  // namespace w4q::checkpoint
