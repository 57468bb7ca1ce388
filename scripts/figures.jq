# The tables of scripts/figures: functions from the results that were read (an array, in the order named) to Markdown.

def fixed($digits):
  (. * pow(10; $digits) + 0.5 | floor | tostring)
  | if length <= $digits then ("0" * ($digits + 1 - length)) + . else . end
  | if $digits == 0 then . else .[:-$digits] + "." + .[-$digits:] end;
def time: if . >= 100 then fixed(0) elif . >= 10 then fixed(1) else fixed(2) end;
def microseconds: if . >= 100 then fixed(0) else fixed(1) end + " µs";
def percent: fixed(0) + " %";
def thousands: fixed(0) | if length > 3 then .[:-3] + "," + .[-3:] else . end;
def line: "| " + join(" | ") + " |";
def table: (.[0] | line), "|" + ("---|" * (.[0] | length)), (.[1:][] | line);

# Decoding (w4q bench): a column for each result.
def decode_rate($name): .steps[] | select(.name == $name).tokens_per_second | fixed(0);
def decode_scheme: .model | split(", ")[1];
def decode_steps($_):
  . as $runs
  | [[""] + map(decode_scheme),
     ["tokens/s"] + map(decode_rate("graph")),
     ["… graph without overlap"] + map(decode_rate("graph without overlap")),
     ["… launches without a graph"] + map(decode_rate("launches without graph")),
     ["calling thread, µs a token"] + map(.steps[0].host_seconds * 1e6 | fixed(1)),
     ["prompt of \($runs[0].prompt_tokens), tokens/s"] + map(.prompt_tokens_per_second | thousands),
     ["first token, ms"] + map(.time_to_first_token * 1e3 | fixed(1)),
     ["GB of weights"] + map(.weight_bytes / 1e9 | fixed(2)),
     ["share of the read bandwidth"] + map(.share_of_roofline * 100 | percent),
     ["RTX 4090, projected, tokens/s"] + map(.rtx4090_projected.tokens_per_second | fixed(0))] | table;
def decode_parts($_):
  . as $runs
  | [[""] + map(decode_scheme)]
    + ($runs[0].parts | map(.name) | map(. as $part | [$part] +
        ($runs | map(.parts[] | select(.name == $part).seconds * 1e6 | fixed(0))))) | table;

# Linear layers (bench_linear_gpu): a column for each of $formats, "/" for the spaces in its name.
def named: gsub("/"; " ");
def linear_shapes($formats):
  .[0].rows as $rows
  | [["1 row"] + $formats | map(named)]
    + ($rows | map(select(.m == 1) | [.n, .k]) | unique | map(. as [$n, $k] | ["\($n) × \($k)"] +
        ($formats | map(named as $format
          | first($rows[] | select(.n == $n and .k == $k and .m == 1 and .format == $format)
              | "\(.us | microseconds), \(.percent_of_read_floor | percent), \(.times_cublas | fixed(2)) ×") // "")))) | table;
def linear_steps($formats):
  .[0].steps as $steps
  | [["rows", "cuBLAS f16"] + $formats | map(named)]
    + ($steps | map(select(.format as $format | $formats | map(named) | index($format)).m) | unique | map(. as $m
        | ["\($m)", (first($steps[] | select(.m == $m)).cublas_ms | time)] + ($formats | map(named as $format
          | first($steps[] | select(.m == $m and .format == $format)
              | "\(.ms | time) (\(.ms_without_overlap | time)), \(.cublas_ms / .ms | fixed(2)) ×") // "")))) | table;
def linear_fits($formats):
  .[0].formats as $fits
  | [["", "t₀, µs", "GB/s", "t₀ without overlap, µs", "GB/s", "decoding, T weights/s",
      "step on an RTX 4090, projected, ms"]]
    + ($formats | map(named as $format | $fits[] | select(.format == $format)
        | [.format, (.fit | (.t0_us | fixed(1)), (.bandwidth_gbs | fixed(0))),
           (.fit_without_overlap | (.t0_us | fixed(1)), (.bandwidth_gbs | fixed(0))),
           (.decoding_gweights_per_s / 1e3 | fixed(1)), (.rtx4090_projected.step_ms | fixed(2))])) | table;

# Rotated layers (bench_rotated_gpu); in brackets one pass whose input is rotated already.
def rotated_header: ["cuBLAS f16", "kbit4", "one pass, 4 bits", "4 + 4, shared", "4 + 4, own", "4 + 2, own"];
def rotated_row(f):
  [.cublas_us, .kbit4_us, .rotated4_us, .rotated44_shared_us, .rotated44_own_us, .rotated42_own_us | f]
  + [.rotated4_input_rotated_us | f] | .[2] += " (\(.[6]))" | .[:6];
def rotated_shapes($_):
  [["1 row, µs"] + rotated_header] + (.[0].rows | map(select(.m == 1) | ["\(.n) × \(.k)"] + rotated_row(time))) | table;
def rotated_steps($_):
  [["rows"] + rotated_header] + (.[0].steps | map(["\(.m)"] + rotated_row(. / 1e3 | time))) | table;

# Attention of one token (bench_attention_gpu): a column for each type of cache.
def attention($types):
  .[0].results as $results
  | [["heads, context"] + $types]
    + (reduce $results[] as $r ([]; if index([[$r.heads, $r.kv_heads, $r.length]]) then . else . + [[$r.heads, $r.kv_heads, $r.length]] end)
       | map(. as [$heads, $kv_heads, $length] | ["\($heads)/\($kv_heads), \($length)"] + ($types | map(. as $kv
          | $results[] | select(.heads == $heads and .kv_heads == $kv_heads and .length == $length and .kv == $kv)
          | (.us_median | microseconds)
            + (if $kv == "f16" then ", \(.GB_per_s | fixed(0)) GB/s" else ", \(.times_f16 | fixed(2)) ×" end)
            + (if .kept_pages < 1 then ", \(.kept_pages * 100 | percent) kept" else "" end))))) | table;

# Passes (bench_cuda_passes): a row for each pass, what and size, a column for each width of kbit with E4M4 scales.
def cuda_passes($_):
  .[0].results
  | map(select(.what | test("kbit[2-5]-b32-e4m4"))
      | . + {bits: (.what | capture("kbit(?<bits>[2-5])-b32-e4m4").bits),
             row: "\(.pass) \(.what | sub("kbit[2-5]-b32-e4m4"; "kbit"))", size: "\(.n) × \(.k)"})
  | . as $all
  | [["pass, share of the ceiling's GB/s", "size", "2 bits", "3 bits", "4 bits", "5 bits", "ceiling"]]
    + (reduce .[] as $r ([]; if index([[$r.row, $r.size, $r.ceiling]]) then . else . + [[$r.row, $r.size, $r.ceiling]] end)
       | map(. as [$row, $size, $ceiling] | [$row, $size] + (["2", "3", "4", "5"] | map(. as $bits
           | first($all[] | select(.row == $row and .size == $size and .bits == $bits).percent | percent) // "–"))
           + [$ceiling])) | table;

# What steps of quality bring (scripts/quality-ladder): a row for each set of steps, two columns for each of $schemes.
def ladder_share: if .row == "good" then "1" else "\(.share | fixed(3)) ± \(.share_error | fixed(3))" end;
def quality_ladder($schemes):
  .[0].rows as $rows
  | [["steps"] + ($schemes | map(., "share of `good`")) + ["processor seconds"]]
    + ($rows | map(.row) | reduce .[] as $row ([]; if index([$row]) then . else . + [$row] end) | map(. as $row
        | ($schemes | map(. as $scheme | $rows | map(select(.row == $row and .scheme == $scheme)) | .[0])) as $cells
        | [$row] + ($cells | map(if . == null then "", "" else "\(.kl | fixed(4)) ± \(.kl_error | fixed(4))", ladder_share end))
          + [$cells | map(select(. != null).processor_seconds | fixed(0)) | join(", ")])) | table;

# The same on other texts and models: a row for each and each scheme, shares of the preset `good` without sweeps there.
def quality_texts($_):
  .[0].rows as $rows
  | [["model, text", "scheme", "without sweeps", "`good`", "`best`", "`max`"]]
    + ($rows | map([.of, .scheme]) | unique | map(. as [$of, $scheme]
        | ($rows | map(select(.of == $of and .scheme == $scheme))) as $own
        | def cell($row): $own | map(select(.row == $row)) | if length == 0 then "–" else .[0] | ladder_share end;
          select(any($own[]; .row == "max"))
        | [$of, $scheme, ($own | map(select(.row == "good"))[0] | "\(.kl | fixed(4)) ± \(.kl_error | fixed(4))"), cell("sweeps"), cell("best"), cell("max")])) | table;

# KL against bits counted from bytes (scripts/frontier): all rows by their bits; bold where none has as few bits and less KL.
def significant: if . >= 0.1 then fixed(3) elif . >= 0.01 then fixed(4) else fixed(5) end;
def quality_frontier($_):
  (.[0].rows | sort_by(.bits)) as $rows
  | [["bits a weight", "MB in all", "what", "KL"]]
    + ($rows | map(. as $row
        | (any($rows[]; .bits <= $row.bits and .kl < $row.kl) | not) as $best
        | [(.bits | fixed(3)), (.bytes / 1e6 | fixed(2)),
           "\(.scheme), \(.curve)" + (if .by == "w4q" then "" else " by \(.by)" end),
           (if $best then "**\(.kl | significant)**" else (.kl | significant) end) + " ± \(.kl_error | significant)"])) | table;

# What people load, ours beside another program's of the same types (scripts/formats): a row for each format.
def quality_formats($_):
  (.[0].rows | map(select((has("way") | not) and (.by == "w4q" or .by == "llama.cpp")))) as $rows
  | [["format", "bits a weight", "MB in all", "w4q", "llama.cpp", "ratio"]]
    + ($rows | map(.format) | reduce .[] as $format ([]; if index([$format]) then . else . + [$format] end) | map(. as $format
        | ($rows | map(select(.format == $format))) as $own
        | ($own | map(select(.by == "w4q")) | .[0]) as $ours | ($own | map(select(.by != "w4q")) | .[0]) as $theirs
        | def cell: if . == null then "–" else "\(.kl | significant) ± \(.kl_error | significant)" end;
          [$format, ($own[0].bits | fixed(3)), ($own[0].bytes / 1e6 | fixed(2)), ($ours | cell), ($theirs | cell),
           (if $ours == null or $theirs == null then "–" else ($ours.kl / $theirs.kl | fixed(2)) end)])) | table;

# What servers load, by ours and by other programs from the same text (scripts/formats): rows by format and KL, of ours the
# share of the least of the others.
def quality_served($_):
  (.[0].rows | map(select(has("way") or (.by != "w4q" and .by != "llama.cpp")))) as $rows
  | [["format", "by", "bits a weight", "MB in all", "KL", "beside the best other"]]
    + ($rows | map(.format) | reduce .[] as $format ([]; if index([$format]) then . else . + [$format] end) | map(. as $format
        | ($rows | map(select(.format == $format)) | sort_by(-.kl)) as $own
        | ($own | map(select(.by != "w4q").kl) | min) as $least
        | $own | map([$format, .by + (if (.way // "") == "" then "" else ", \(.way)" end), (.bits | fixed(3)), (.bytes / 1e6 | fixed(2)),
                      "\(.kl | significant) ± \(.kl_error | significant)",
                      (if .by != "w4q" or $least == null then "" else .kl / $least | fixed(2) end)])) | add) | table;
