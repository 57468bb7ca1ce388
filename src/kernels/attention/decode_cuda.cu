// Attention of one token. A block has one key head (and up to eight of the query heads that read it, at most four while
// the context is short) and a stretch of pages; its warps take pages in turn, into registers or through a ring of their own in shared memory (the next page
// of fp8 and fp4r, all of q4): no barrier of the block in the loop. Per page and warp: dim/16 mma for the scores of
// eight heads (of four with f16, whose queries have two parts; for more, twice as many), dim/16 for the output. The
// token's own key and value are attended to from shared memory, so that nothing waits for their way into the cache.
#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/text.h"
#include "device/alignment.h"
#include "kernels/attention/decode_parts.cuh"
#include "kernels/attention/kept.cuh"
#include "kernels/attention/loop.cuh"
#include "kernels/attention/merge.cuh"
#include "kernels/attention/pages.cuh"
#include "kernels/common/dependent_launch.cuh"

namespace w4q::kernels {
namespace decode {
namespace {

/// What the warps of a block share.
template <KvType type, int dim>
struct Shared {
  std::byte fresh[kv_head_page_bytes(type, dim) + kv_value_page_bytes(type, dim)];  ///< the token's own key and value
  QueryRow<dim> queries[query_rows<type>];
  WarpSpace<type, dim> spaces[warps<dim>];
};

/// Every page that the token sees.
template <KvType type, int dim>
__global__ void __launch_bounds__(threads<dim>, 1) decode_attention_kernel(const Task task) {
  extern __shared__ uint4 memory[];
  auto& shared = *reinterpret_cast<Shared<type, dim>*>(memory);
  device::trigger_dependent_launch();
  // Only q, k and v are the launch before's.
  BlockHeads heads(task);
  const SeenPages seen(task, read_position(task));
  const Sharers sharers(heads, seen.pages);
  const Stretch stretch(seen, sharers.split, sharers.splits);
  if (sharers.split >= stretch.active) return;
  EarlyLoads<dim> early(task, heads);
  early.look_up(task, seen.position);
  prefetch_sinks(task, heads);
  if (sharers.apart > 1) heads.halve(sharers.first != 0);
  const bool last = sharers.split + 1 == stretch.active;
  auto& space = shared.spaces[threadIdx.x / 32];
  const PoolPages<dim> pages(task.layer, stretch.first, 1, stretch.past - stretch.first);
  const auto attend = [&](auto& attending, float* row) {
    attending.begin();
    device::wait_grid_dependency();
    early.ask(task);
    prepare_heads<type, dim>(task, heads, early, stretch.position, last, row, shared.queries, shared.fresh);
    typename PageKeys<type, dim>::Queries queries;
    if constexpr (has_low_parts(type)) {
      queries.load(shared.queries, heads.count);
    } else {
      queries.load(shared.queries);
    }
    Running<type, dim> running;
    running.clear();
    // While pages are on their way.
    if (last && threadIdx.x / 32 == warps<dim> - 1) {
      attend_to_itself<type, dim>(task, stretch.position, shared.fresh, queries, running);
    }
    attending.run(queries, running);
    __syncwarp();
    running.store(space.partial);
  };
  if constexpr (type == KvType::q4) {
    RingAttending<dim> attending(task, stretch, heads.kv_head, pages, space.ring);
    attend(attending, space.ring.row());
  } else {
    Attending<type, dim> attending(task, stretch, heads.kv_head, pages, space);
    attend(attending, space.next.row());
  }
  __syncthreads();
  merge<dim>(task, heads, sharers, stretch.active, shared.spaces);
}

/// Pages of fp4r whose coarse scores come close enough to the largest ones of some pages; without a margin, where
/// nothing `chooses`, all of them.
template <int dim, bool chooses>
__global__ void __launch_bounds__(threads<dim>, 1) pruned_attention_kernel(const Task task) {
  constexpr KvType type = KvType::fp4r;
  /// There is room for a head behind the ring; otherwise it takes the ring's last place.
  constexpr bool has_row = has_next_page<type, dim> && sizeof(Fp4Ring<dim>) <= NextPage<type, dim>::bytes;
  extern __shared__ uint4 memory[];
  auto& shared = *reinterpret_cast<Shared<type, dim>*>(memory);
  __shared__ PageChoice<dim> choice;
  device::trigger_dependent_launch();
  prefetch_table(task.layer);
  device::wait_grid_dependency();
  const int split = static_cast<int>(blockIdx.y);
  const BlockHeads heads(task);
  EarlyLoads<dim> early(task, heads);
  early.ask(task);
  const Stretch stretch(SeenPages(task, read_position(task)), split, static_cast<int>(gridDim.y));
  const int active =
      min(static_cast<int>(gridDim.y), (stretch.pages + pruned_pages_per_split - 1) / pruned_pages_per_split);
  if (split >= active) return;
  early.look_up(task, stretch.position);
  const bool last = split + 1 == active;
  const int warp = static_cast<int>(threadIdx.x / 32);
  auto& space = shared.spaces[warp];
  const OwnPages own(task, stretch, split, active);
  QueryFragments<type, dim> queries;
  KeptPage own_first;
  PageList<dim> list(task, stretch, own);
  {
    PageScoring<dim> scoring(task, heads, stretch, own, space.ring);
    if (chooses) scoring.ask();
    if (chooses && has_row) scoring.ask();
    choice.begin(own.count, !chooses);
    float* const row = has_row ? space.next.row() : space.ring.row();
    prepare_heads<type, dim>(task, heads, early, stretch.position, last, row, shared.queries, shared.fresh);
    if (chooses && !has_row) scoring.ask();
    queries.load(shared.queries);
    own_first = chooses ? scoring.run(queries, choice) : KeptPage::none();
  }
  KeptAttending<dim> attending(task, stretch, heads, choice.coarse, space.next);
  attending.ask(own_first);
  Running<type, dim> running;
  running.clear();
  while (!list.ended()) {
    const int count = list.fill(choice, own_first);
    attending.run(choice.list, count, queries, running);
  }
  if (last && warp == warps<dim> - 1) {
    attend_to_itself<type, dim>(task, stretch.position, shared.fresh, queries, running);
  }
  __syncwarp();
  running.store(space.partial);
  __syncthreads();
  merge<dim>(task, heads, Sharers(), active, shared.spaces);
  if (warp == warps<dim> - 1) count_kept(task, split, active, list.kept);
}

struct Grid {
  dim3 blocks;
  bool overlap;
};

template <KvType type, int dim>
void launch_dim(const Task& task, const Grid& grid, const device::Stream& stream) {
  constexpr int bytes = sizeof(Shared<type, dim>);
  if constexpr (type == KvType::fp4r) {
    static_assert(bytes + sizeof(PageChoice<dim>) <= least_shared_bytes);
    const auto launch_it = [&]<bool chooses>() {
      launch<pruned_attention_kernel<dim, chooses>>({grid.blocks, threads<dim>, bytes, grid.overlap}, stream,
                                                    "pruned_attention", task);
    };
    if (task.margin < INFINITY) return launch_it.template operator()<true>();
    launch_it.template operator()<false>();
  } else {
    static_assert(bytes <= least_shared_bytes);
    launch<decode_attention_kernel<type, dim>>({grid.blocks, threads<dim>, bytes, grid.overlap}, stream,
                                               "decode_attention", task);
  }
}

template <KvType type>
void launch_type(const Task& task, const Grid& grid, const device::Stream& stream) {
  switch (kv_padded_dim(task.layer.head_dim)) {
    case 64:
      return launch_dim<type, 64>(task, grid, stream);
    case 128:
      return launch_dim<type, 128>(task, grid, stream);
    default:
      return launch_dim<type, 256>(task, grid, stream);
  }
}

/// Where things stand in the workspace.
struct Workspace {
  size_t mailboxes, kept, end;

  Workspace(const DecodeAttentionShape& shape, const Plan& plan) {
    const auto blocks = static_cast<size_t>(shape.kv_heads * plan.head_tiles * plan.splits);
    const auto columns = static_cast<size_t>(tile_heads * kv_padded_dim(shape.head_dim) / 2);
    end = 0;
    const auto take = [&](size_t bytes) { return std::exchange(end, end + device::round_up_256(bytes)); };
    mailboxes = take(blocks * columns * sizeof(frame::MailboxWord));
    kept = take(shape.type == KvType::fp4r ? blocks * sizeof(frame::MailboxWord) : 0);
  }
};

void check(const DecodeAttentionArgs& args) {
  const PagedLayer& layer = args.layer;
  ensure(layer.kv_heads > 0 && args.heads % layer.kv_heads == 0 && layer.head_dim <= kv_most_dim &&
             2 * args.rotation.pairs <= layer.head_dim,
         "decode_attention: shapes do not fit");
  ensure(layer.type != KvType::fp4r || (args.capacity >= 1 && args.delta >= 0), "decode_attention: no capacity");
}

}  // namespace
}  // namespace decode

size_t decode_attention_workspace(const device::Properties& gpu, const DecodeAttentionShape& shape) {
  if (shape.type == KvType::fp4r && shape.capacity > fp4r_most_tokens) {
    throw Error(ErrorCode::unsupported, concat("--kv fp4r with a context of ", shape.capacity, " tokens"))
        .detail(concat("pages are chosen among at most ", fp4r_most_tokens, " tokens"))
        .hint("--kv fp8 and q4 take any");
  }
  return decode::Workspace(shape, decode::plan_for(gpu, shape.heads, shape.kv_heads)).end;
}

void decode_attention_cuda(const DecodeAttentionArgs& args, const device::Stream& stream) {
  decode::check(args);
  const PagedLayer& layer = args.layer;
  const decode::Plan plan = decode::plan_for(stream.context().properties(), args.heads, layer.kv_heads);
  const decode::Workspace at({args.heads, layer.kv_heads, layer.head_dim, layer.type, args.capacity}, plan);
  decode::Task task{};
  task.qkv = args.qkv;
  task.layer = layer;
  task.rotation = args.rotation;
  task.position = args.position;
  task.sinks = args.sinks;
  task.out = args.out;
  task.mailboxes = reinterpret_cast<frame::MailboxWord*>(args.workspace + at.mailboxes);
  task.kept_mailboxes = reinterpret_cast<frame::MailboxWord*>(args.workspace + at.kept);
  task.keep_mask = args.keep_mask;
  task.kept = args.kept;
  task.mask_words = (args.capacity + 32 * kv_page_tokens - 1) / (32 * kv_page_tokens);
  task.margin = args.delta * log2_e;
  task.window = args.window;
  task.heads = args.heads;
  task.group = args.heads / layer.kv_heads;
  task.head_tiles = plan.head_tiles;
  const decode::Grid grid{
      dim3(static_cast<unsigned>(layer.kv_heads * plan.head_tiles), static_cast<unsigned>(plan.splits)), args.overlap};
  switch (layer.type) {
    case KvType::f16:
      return decode::launch_type<KvType::f16>(task, grid, stream);
    case KvType::fp8:
      return decode::launch_type<KvType::fp8>(task, grid, stream);
    case KvType::q4:
    case KvType::q4h:
      return decode::launch_type<KvType::q4>(task, grid, stream);
    case KvType::fp4r:
      return decode::launch_type<KvType::fp4r>(task, grid, stream);
  }
}

}  // namespace w4q::kernels
