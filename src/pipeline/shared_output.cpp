#include "pipeline/shared_output.h"

#include <fcntl.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <set>

#include "core/progress.h"
#include "core/text.h"
#include "io/files.h"
#include "io/system.h"

namespace w4q::pipeline {
namespace {

namespace fs = std::filesystem;

/// "w4q_journal.json" says what is done in a folder, "w4q_journal.3.jsonl" what rank 3 has finished.
constexpr std::string_view journal_prefix = "w4q_journal.";

fs::path journal_of(const fs::path& folder) { return folder / concat(journal_prefix, "json"); }

std::vector<fs::path> journals(const fs::path& folder) {
  std::vector<fs::path> found;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().filename().native().starts_with(journal_prefix)) found.push_back(entry.path());
  }
  std::ranges::sort(found);
  return found;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t begin = 0, end = 0; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1) {
    lines.push_back(text.substr(begin, end - begin));
  }
  return lines;
}

/// What a pipe gave is gone: whether the next run is given the same nobody can tell.
void refuse_streams(const std::vector<fs::path>& inputs) {
  for (const auto& input : inputs) {
    std::error_code missing;  // which is said where it is opened
    const fs::file_status status = fs::status(input, missing);
    if (!fs::exists(status) || fs::is_regular_file(status) || fs::is_directory(status)) continue;
    throw Error(ErrorCode::bad_argument, concat("--resume: ", io::shown(input), " is no regular file"))
        .detail("whether a later run reads the same from it cannot be told")
        .hint("write what it gives into a file first, or leave out --resume");
  }
}

/// Of one line; null where it is none, such as the last of a run that was killed.
io::Json parsed(const std::string& line) { return io::Json::parse(line, nullptr, false); }

}  // namespace

SharedFolder::SharedFolder(const Sharing& sharing, const fs::path& target, bool overwrite,
                           const std::vector<fs::path>& inputs, const std::function<bool(const fs::path&)>& replaceable)
    : sharing_(sharing) {
  if (sharing_.resume) refuse_streams(inputs);
  try {
    join(target, overwrite, inputs, replaceable);
  } catch (...) {
    if (made_ && made_->taken_up()) made_->leave_unfinished();  // a run that cannot begin takes nothing away
    throw;
  }
}

void SharedFolder::join(const fs::path& target, bool overwrite, const std::vector<fs::path>& inputs,
                        const std::function<bool(const fs::path&)>& replaceable) {
  std::string made;
  if (ranks().first()) made = make_folder(target, overwrite, inputs, replaceable);
  find_disks(target, inputs, std::move(made));
  if (!leads()) inputs_ = io::InputStates(inputs);
  if (!leads() && !sharing_.resume) others_.emplace(staging_);
  if (ranks().first() && sharing_.resume && notes_.empty() && !any_taken_up_) {
    notes_.emplace_back("there was nothing to resume: begun from the start");
  }
  if (sharing_.local_disks) require_same_inputs();
}

std::string SharedFolder::make_folder(const fs::path& target, bool overwrite, const std::vector<fs::path>& inputs,
                                      const std::function<bool(const fs::path&)>& replaceable) {
  io::OutputFolder::TakeUp take_up;
  if (sharing_.resume) take_up = [this](const auto& left, const auto& states) { return is_ours(left, states); };
  made_.emplace(target, overwrite, inputs, replaceable, take_up);
  return concat(made_->taken_up() ? "+" : "-", made_->staging().native());
}

void SharedFolder::find_disks(const fs::path& target, const std::vector<fs::path>& inputs, std::string made) {
  disks_.assign(static_cast<size_t>(ranks().size()), -1);
  for (int first = 0; first >= 0;) {
    made = ranks().broadcast(std::move(made), first);
    const fs::path place = made.substr(1);
    std::error_code unseen;
    const bool here = disk() < 0 && (first == ranks().rank() || fs::exists(place, unseen));
    if (here) taken_up_ = made.front() == '+', staging_ = place;
    any_taken_up_ = any_taken_up_ || made.front() == '+';
    const auto seen = ranks().gather_everywhere(here ? "here" : "");
    for (size_t rank = 0; rank < seen.size(); ++rank) {
      if (!seen[rank].empty()) disks_[rank] = first;
    }
    const auto next = std::ranges::find(disks_, -1);
    first = next == disks_.end() ? -1 : static_cast<int>(next - disks_.begin());
    if (first != ranks().rank()) continue;
    if (!sharing_.local_disks) refuse_unseen(target);
    // What stands at the output's name on a disk of its own stays as it is.
    made = make_folder(target, true, inputs, [](const auto&) { return true; });
  }
}

void SharedFolder::refuse_unseen(const fs::path& target) const {
  throw Error(ErrorCode::bad_file,
              concat(io::shown(target), ": not every rank sees the folder that the first one made for it"))
      .detail("expected a file system that all of them share")
      .hint(
          "write to one, or --local-disks: ranks write to their own disks, and the first one puts the parts together");
}

/// Of each what all ranks must find alike, which have copies of their own.
void SharedFolder::require_same_inputs() const {
  std::string own;
  for (const auto& line : inputs().beginnings()) own += line + "\n";
  const auto expected = lines_of(ranks().broadcast(own)), found = lines_of(own);
  const auto [theirs, ours] = std::ranges::mismatch(expected, found);
  if (theirs == expected.end() && ours == found.end()) return;
  throw Error(ErrorCode::mismatch, "the copies of an input differ between ranks")
      .detail(concat("expected ", theirs == expected.end() ? "no more files" : printable(*theirs), ", as at rank 0"))
      .detail(concat("found ", ours == found.end() ? "no more files" : printable(*ours)))
      .hint("copy the same model, texts and recipes to every host");
}

SharedFolder::~SharedFolder() {
  std::error_code unknown;
  if (ranks().first() && made_ && std::uncaught_exceptions() > 0) ranks().stop_others();
  if (made_ && sharing_.resume && fs::exists(journal_of(staging_), unknown)) made_->leave_unfinished();
}

/// Of what was left from what is asked for; empty: it can be taken up.
std::string SharedFolder::difference(const io::Json& journal, const io::InputStates& inputs) const {
  if (journal.at("command") != sharing_.command) return "another command's";
  if (journal.at("inputs") != inputs.text()) return "of inputs that have changed since";
  const auto before = journal.at("products").get<std::string>();
  if (before == sharing_.products) return {};
  return concat("calibrated with ", printable(before), ", and this one multiplies with ", printable(sharing_.products));
}

bool SharedFolder::is_ours(const fs::path& left, const io::InputStates& inputs) try {
  const io::Json journal = io::read_json(journal_of(left));
  const std::string why = difference(journal, inputs);
  if (why.empty()) return true;
  notes_.push_back("begun from the start: what a run left was " + why);
  return false;
} catch (const std::exception&) {
  return false;  // it did not come to the point where there is something to take up
}

void SharedFolder::begin_journal() {
  if (!made_ || taken_up_) return;
  const io::Json journal = {
      {"command", sharing_.command}, {"inputs", inputs().text()}, {"products", sharing_.products}};
  io::write_file(journal_of(staging_), journal.dump(-1, ' ', false, io::Json::error_handler_t::replace), false);
  if (sharing_.resume) made_->outlast();
}

void SharedFolder::agree_on_inputs() const {
  if (!ranks().first()) inputs().check();
  ranks().barrier();
  if (!ranks().first()) inputs().let_go();
}

void SharedFolder::remove_part() {
  if (!ranks().first()) made_.reset();
}

void SharedFolder::end_journal() {
  for (const auto& path : journals(staging_)) fs::remove(path);
}

std::vector<int> deal(std::span<const WorkUnit* const> units, int ranks) {
  std::vector<int64_t> load(static_cast<size_t>(ranks));
  std::vector<int> owners(units.size());
  std::vector<size_t> by_cost;
  size_t turn = 0;
  for (size_t unit = 0; unit < units.size(); ++unit) {
    if (!units[unit]->in_turn) {
      by_cost.push_back(unit);
      continue;
    }
    owners[unit] = static_cast<int>(turn++ % load.size());
    load[static_cast<size_t>(owners[unit])] += units[unit]->cost;
  }
  std::ranges::stable_sort(by_cost, std::greater(), [&](size_t unit) { return units[unit]->cost; });
  for (const size_t unit : by_cost) {
    const auto least = std::ranges::min_element(load);
    *least += units[unit]->cost;
    owners[unit] = static_cast<int>(least - load.begin());
  }
  return owners;
}

SharedWork::SharedWork(SharedFolder& folder, io::CheckpointWriter& writer, std::vector<WorkUnit> units)
    : folder_(folder), writer_(writer), units_(std::move(units)), records_(units_.size()), disks_(units_.size(), -1) {
  for (size_t unit = 0; unit < units_.size(); ++unit) numbers_.emplace(units_[unit].name, unit);
  folder_.begin_journal();
  take_up();
  std::vector<const WorkUnit*> left;
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    if (!records_[unit]) left.push_back(&units_[unit]);
  }
  const auto dealt = deal(left, folder_.ranks().size());
  size_t next = 0;
  for (const auto& record : records_) owners_.push_back(record ? -1 : dealt[next++]);
  const fs::path path = folder_.staging() / concat(journal_prefix, folder_.ranks().rank(), ".jsonl");
  journal_ = io::open_file(path, O_WRONLY | O_CREAT | O_APPEND);
  if (folder_.taken_up()) append("\n");  // behind a line that a killed run did not end
}

void SharedWork::take_up() {
  std::string text;
  if (folder_.taken_up() && folder_.leads()) {
    for (const auto& path : journals(folder_.staging())) {
      if (path.extension() == ".jsonl") text += io::read_file(path);
    }
  }
  auto& ranks = folder_.ranks();
  const auto texts = ranks.gather_everywhere(std::move(text));
  std::string good;
  for (const auto& line : checked(lines_of(texts[static_cast<size_t>(folder_.disk())]))) good += line + "\n";
  const auto parts = ranks.gather_everywhere(std::move(good));
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    for (const auto& line : lines_of(parts[rank])) adopt(parsed(line), folder_.disks()[rank]);
  }
  if (!folder_.any_taken_up()) return;
  const auto finished = std::ranges::count_if(records_, [](const auto& record) { return record.has_value(); });
  folder_.note(concat("resumed: ", finished, " of ", units_.size(), " parts were finished"));
}

/// Of the lines that are this rank's to check those whose tensors are all there.
std::vector<std::string> SharedWork::checked(const std::vector<std::string>& lines) const {
  std::vector<std::string> good;
  const auto& disks = folder_.disks();
  const auto sharers = static_cast<size_t>(std::ranges::count(disks, folder_.disk()));
  const auto own =
      static_cast<size_t>(std::count(disks.begin(), disks.begin() + folder_.ranks().rank(), folder_.disk()));
  for (size_t i = 0; i < lines.size(); ++i) {
    if (i % sharers != own) continue;
    const io::Json line = parsed(lines[i]);
    if (!line.is_object()) continue;
    const auto unit = numbers_.find(line.at("unit").get<std::string>());
    if (unit == numbers_.end() || line.at("tensors").size() != units_[unit->second].tensors.size()) continue;
    const bool there = std::ranges::all_of(units_[unit->second].tensors, [&](const std::string& name) {
      const auto digest = io::parse_tensor_digest(line.at("tensors").value(name, ""));
      return digest && writer_.holds(name, *digest);
    });
    if (there) good.push_back(lines[i]);
  }
  return good;
}

void SharedWork::adopt(const io::Json& line, int disk) {
  const size_t unit = numbers_.at(line.at("unit").get<std::string>());
  if (records_[unit]) return;  // another disk holds it too
  records_[unit] = line.at("record");
  disks_[unit] = disk;
  if (disk != folder_.disk()) {
    if (folder_.ranks().first()) elsewhere_[unit] = line;
    return;
  }
  for (const auto& [name, digest] : line.at("tensors").items()) {
    writer_.adopt(name, *io::parse_tensor_digest(digest.get<std::string>()));
  }
}

void SharedWork::append(std::string_view text) {
  io::write_all(journal_, std::as_bytes(std::span(text)), 0, folder_.staging());  // O_APPEND: at the end all the same
}

int64_t SharedWork::cost() const noexcept {
  int64_t sum = 0;
  for (size_t unit = 0; unit < units_.size(); ++unit) sum += mine(unit) ? units_[unit].cost : 0;
  return sum;
}

void SharedWork::done(size_t unit, const io::Json& record) {
  io::Json tensors = io::Json::object();
  for (const auto& name : units_[unit].tensors) tensors[name] = writer_.digest(name).text();
  const io::Json entry = {{"unit", units_[unit].name}, {"tensors", std::move(tensors)}, {"record", record}};
  const std::string line = entry.dump() + "\n";
  const std::lock_guard lock(mutex_);
  append(line);
  finished_ += line;
  records_[unit] = record;
}

std::vector<io::Json> SharedWork::gather() {
  auto& ranks = folder_.ranks();
  if (!ranks.first() && folder_.disk() == 0) writer_.sync();
  const auto all = ranks.gather(std::move(finished_));
  for (size_t rank = 1; rank < all.size(); ++rank) {
    for (const auto& line : lines_of(all[rank])) adopt(parsed(line), folder_.disks()[rank]);
  }
  put_together();
  std::vector<io::Json> records;
  if (!ranks.first()) return records;
  for (auto& record : records_) {
    ensure(record.has_value(), "a part of the work that nobody did");
    records.push_back(std::move(*record));
  }
  return records;
}

/// Units in the order in which a rank sends them: what it did, and of its disk what was finished before.
std::vector<size_t> SharedWork::sent_by(int rank) const {
  std::vector<size_t> units;
  if (folder_.disks()[static_cast<size_t>(rank)] == 0) return units;
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    const bool kept = owners_[unit] < 0 && disks_[unit] == rank;
    if (kept || owners_[unit] == rank) units.push_back(unit);
  }
  return units;
}

void SharedWork::put_together() {
  auto& ranks = folder_.ranks();
  if (!ranks.first()) {
    for (const size_t unit : sent_by(ranks.rank())) {
      for (const auto& name : units_[unit].tensors) {
        writer_.read(name, [&](std::span<const std::byte> piece) {
          ranks.send(0, std::string(reinterpret_cast<const char*>(piece.data()), piece.size()));
        });
        ranks.send(0, {});
      }
    }
    return;
  }
  if (elsewhere_.empty()) return;
  Progress progress("put together", static_cast<int64_t>(elsewhere_.size()), "parts");
  int64_t bytes = 0;
  for (int rank = 1; rank < ranks.size(); ++rank) {
    for (const size_t unit : sent_by(rank)) {
      bytes += receive(rank, unit);
      progress.advance(1);
    }
  }
  const std::set<int> disks(folder_.disks().begin(), folder_.disks().end());
  folder_.note(concat("put together from ", disks.size(), " disks: ", human_bytes(bytes), " came from other ranks"));
}

/// Returns how many bytes came.
int64_t SharedWork::receive(int from, size_t unit) {
  const io::Json& line = elsewhere_.at(unit);
  int64_t sum = 0;
  for (const auto& name : units_[unit].tensors) {
    int64_t size = 0;
    for (std::string piece; !(piece = folder_.ranks().receive(from)).empty();
         size += static_cast<int64_t>(piece.size())) {
      writer_.write_part(name, size, std::as_bytes(std::span(piece)));
    }
    sum += size;
    const auto expected = line.at("tensors").at(name).get<std::string>(), found = writer_.digest(name).text();
    if (found == expected) continue;
    throw Error(ErrorCode::bad_file, concat(printable(name), ": is not what rank ", from, " wrote"))
        .detail(concat("expected ", expected))
        .detail(concat("found ", found))
        .hint("the disk of that rank's host, or the network, changed it: look at these, and run again");
  }
  append(line.dump() + "\n");
  return sum;
}

}  // namespace w4q::pipeline
