// Attention of a step over the paged KV cache: cuts the step into jobs, which threads take as they
// become free, the longest first.
//
//     few lines of a KV head (decode)     a job: one piece of a row's keys, for one KV head or all;
//                                         pieces are added up when all jobs are done
//     many lines (prefill)                a job: a block of lines of one KV head, all their keys
//
// Which way a row goes, its tiles and its pieces depend on the row alone: so its result depends
// neither on its neighbours nor on the number of threads.

#include <cstdlib>
#include <memory>
#include <new>
#include <omp.h>
#include <vector>

#include "arguments.h"
#include "attention_few.h"
#include "attention_tiles.h"

namespace {

constexpr int MIN_TILED_LINES = 12;  // to pack a tile costs about what so many lines cost
constexpr int MIN_STRIPS = 4, MAX_STRIPS = 32;  // of a job
constexpr int64_t BLOCK_FLOATS = 1 << 16;  // queries and sums of a job stay in the second cache
constexpr int JOBS_PER_THREAD = 4;

struct Job {
    int64_t row, kv_head;
    int64_t num_kv_heads;  // 0: a block of lines
    int64_t first, last;   // lines of a block, or positions of the keys of a piece
    float* partials;       // of a piece's first KV head
    int64_t cost;
};

// A row whose lines are few, and where its pieces leave their partial results.
struct FewRow {
    int64_t row, num_pieces;
    float* partials;
};

struct FreeMemory {
    void operator()(float* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<float, FreeMemory>;

Memory allocate(int64_t num_floats) {
    const size_t size = (static_cast<size_t>(num_floats) * sizeof(float) / 64 + 1) * 64;
    Memory memory(static_cast<float*>(std::aligned_alloc(64, size)));
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
}

template <typename Number>
class StepAttention {
public:
    StepAttention(const Step& step, const Layer<Number>& layer, int num_threads)
        : step_(step), layer_(layer), num_threads_(num_threads) {
        cut_few_rows();
        cut_tiled_rows();
        std::stable_sort(jobs_.begin(), jobs_.end(),
                         [](const Job& a, const Job& b) { return a.cost > b.cost; });
    }

    void run() {
        const int64_t num_jobs = jobs_.size(), num_few = few_.size();
        if (num_jobs == 0) return;
        const int64_t stride = (num_scratch_floats() + 15) / 16 * 16;
        const int num_threads = static_cast<int>(std::min<int64_t>(num_threads_, num_jobs));
        const Memory scratch = allocate(stride * num_threads);
#pragma omp parallel num_threads(num_threads)
        {
            float* own = scratch.get() + omp_get_thread_num() * stride;
#pragma omp for schedule(dynamic, 1)
            for (int64_t i = 0; i < num_jobs; ++i) {
                if (jobs_[i].num_kv_heads > 0)
                    attend_piece(jobs_[i], jobs_[std::min(i + num_threads, num_jobs - 1)], own);
                else
                    attend_block(jobs_[i], own);
            }
#pragma omp for schedule(static)
            for (int64_t i = 0; i < num_few * layer_.num_kv_heads; ++i)
                merge(few_[i / layer_.num_kv_heads], i % layer_.num_kv_heads);
        }
    }

private:
    int64_t num_lines(const Row& row) const { return row.num_queries * layer_.group(); }
    bool has_few_lines(const Row& row) const { return num_lines(row) < MIN_TILED_LINES; }
    int64_t first_key(const Row& row) const { return layer_.first_seen(row.num_context); }

    int64_t num_pieces(const Row& row) const {
        return (row.num_keys() - 1) / PIECE - first_key(row) / PIECE + 1;
    }

    // Floats of the partial results of one KV head.
    int64_t num_head_floats(const Row& row) const {
        return num_lines(row) * num_partial_floats(layer_.value_dim);
    }

    void cut_few_rows() {
        int64_t num_all_pieces = 0, num_floats = 0;
        for (int64_t index = 0; index < step_.num_rows; ++index) {
            const Row row(step_, index);
            if (!has_few_lines(row)) continue;
            few_.push_back({index, num_pieces(row), nullptr});
            num_all_pieces += num_pieces(row);
            num_floats += num_pieces(row) * layer_.num_kv_heads * num_head_floats(row);
        }
        partials_ = allocate(num_floats);
        // A job of all KV heads reads whole tokens, in order; with few pieces there is too little
        // to share out that way.
        const bool takes_all = num_all_pieces >= JOBS_PER_THREAD * num_threads_;
        float* next = partials_.get();
        for (FewRow& few : few_) {
            few.partials = next;
            cut_pieces(few, takes_all ? layer_.num_kv_heads : 1);
            next += few.num_pieces * layer_.num_kv_heads * num_head_floats(Row(step_, few.row));
        }
    }

    void cut_pieces(const FewRow& few, int64_t num_kv_heads) {
        const Row row(step_, few.row);
        const int64_t begin = first_key(row), end = row.num_keys();
        const int64_t per_head = num_head_floats(row);
        for (int64_t piece = 0; piece < few.num_pieces; ++piece) {
            const int64_t start = (begin / PIECE + piece) * PIECE;
            const int64_t first = std::max(start, begin), last = std::min(start + PIECE, end);
            for (int64_t head = 0; head < layer_.num_kv_heads; head += num_kv_heads) {
                float* partials = few.partials + (piece * layer_.num_kv_heads + head) * per_head;
                const int64_t cost = (last - first) * num_kv_heads * num_lines(row);
                jobs_.push_back({few.row, head, num_kv_heads, first, last, partials, cost});
            }
        }
    }

    void cut_tiled_rows() {
        int64_t num_strips = 0;
        for (int64_t index = 0; index < step_.num_rows; ++index) {
            const Row row(step_, index);
            if (has_few_lines(row)) continue;
            num_strips += (num_lines(row) + STRIP - 1) / STRIP * layer_.num_kv_heads;
        }
        const int64_t most = BLOCK_FLOATS / (STRIP * (layer_.key_dim + layer_.value_dim));
        const int64_t fair = num_strips / (2 * JOBS_PER_THREAD * num_threads_);
        num_strips_ = std::max<int64_t>(MIN_STRIPS, std::min<int64_t>({most, fair, MAX_STRIPS}));
        for (int64_t index = 0; index < step_.num_rows; ++index) {
            const Row row(step_, index);
            if (!has_few_lines(row)) cut_blocks(index, row);
        }
    }

    void cut_blocks(int64_t index, const Row& row) {
        const int64_t size = num_strips_ * STRIP;
        for (int64_t head = 0; head < layer_.num_kv_heads; ++head) {
            for (int64_t first = 0; first < num_lines(row); first += size) {
                const int64_t last = std::min(first + size, num_lines(row));
                const int64_t begin = layer_.first_seen(row.num_context + first / layer_.group());
                const int64_t end = row.num_context + (last - 1) / layer_.group() + 1;
                jobs_.push_back({index, head, 0, first, last, nullptr,
                                 (last - first) * (end - begin)});
            }
        }
    }

    // Of one thread.
    int64_t num_scratch_floats() const {
        return std::max(LineBlock<Number>::num_floats(layer_, num_strips_),
                        layer_.num_kv_heads *
                            FewLines<Number>::num_floats(layer_, MIN_TILED_LINES));
    }

    // `next` is likely what this thread takes after it: its first tile is fetched meanwhile.
    void attend_piece(const Job& job, const Job& next, float* scratch) const {
        const Row row(step_, job.row);
        const int64_t per_head = num_head_floats(row);
        const int64_t query_floats = FewLines<Number>::num_floats(layer_, num_lines(row));
        int64_t slots[PIECE + TILE];
        const int64_t count = job.last - job.first, ahead = std::min<int64_t>(TILE, count);
        row.find_slots(job.first, job.last, slots);
        std::fill_n(slots + count, ahead, slots[count - 1]);
        if (next.num_kv_heads > 0)
            Row(step_, next.row)
                .find_slots(next.first, std::min(next.first + ahead, next.last), slots + count);
        for (int64_t head = 0; head < job.num_kv_heads; ++head) {
            const Lines<Number> lines{layer_, row, job.kv_head + head};
            FewLines<Number>(lines, scratch + head * query_floats, job.partials + head * per_head)
                .begin();
        }
        for (int64_t first = job.first; first < job.last;) {
            const int64_t last = std::min((first / TILE + 1) * TILE, job.last);
            for (int64_t head = 0; head < job.num_kv_heads; ++head) {
                const Lines<Number> lines{layer_, row, job.kv_head + head};
                FewLines<Number>(lines, scratch + head * query_floats,
                                 job.partials + head * per_head)
                    .attend(first, last, slots + (first - job.first), ahead);
            }
            first = last;
        }
    }

    void attend_block(const Job& job, float* scratch) const {
        const Row row(step_, job.row);
        const Lines<Number> lines{layer_, row, job.kv_head};
        Running<STRIP> running[MAX_STRIPS];
        LineBlock<Number>(lines, job.first, job.last - job.first, scratch).attend(running);
    }

    void merge(const FewRow& few, int64_t kv_head) const {
        const Row row(step_, few.row);
        const Lines<Number> lines{layer_, row, kv_head};
        const int64_t per_head = num_head_floats(row);
        merge_pieces(lines, few.partials + kv_head * per_head, few.num_pieces,
                     layer_.num_kv_heads * per_head);
    }

    const Step& step_;
    const Layer<Number>& layer_;
    const int num_threads_;
    int64_t num_strips_ = MIN_STRIPS;
    std::vector<FewRow> few_;
    std::vector<Job> jobs_;
    Memory partials_;
};

// --- as a kernel ----------------------------------------------------------------------------------

// The arrays of a Step, sinks or null, query, keys, values, out; sizes and numbers as below.
template <typename Number>
void attend(Arguments given) {
    const auto* starts = given.tensor<const int64_t>();
    const auto* num_queries = given.tensor<const int64_t>();
    const auto* num_context = given.tensor<const int64_t>();
    const auto* table_starts = given.tensor<const int64_t>();
    const auto* tables = given.tensor<const int32_t>();
    const int64_t num_rows = given.size(), block_size = given.size();
    const Step step{num_rows, block_size, starts, num_queries, num_context, table_starts, tables};
    Layer<Number> layer;
    layer.sinks = given.tensor<const float>();
    layer.query = given.tensor<const Number>();
    layer.keys = given.tensor<const Number>();
    layer.values = given.tensor<const Number>();
    layer.out = given.tensor<Number>();
    layer.num_heads = given.size();
    layer.num_kv_heads = given.size();
    layer.key_dim = given.size();
    layer.value_dim = given.size();
    layer.window = given.size();
    layer.query_token_stride = given.size();
    layer.query_head_stride = given.size();
    layer.scaling = given.number();
    layer.softcap = given.number();
    StepAttention<Number>(step, layer, static_cast<int>(given.size())).run();
}

}  // namespace

DEFINE_KERNEL(attend_float32, attend<float>)
DEFINE_KERNEL(attend_bfloat16, attend<BFloat16>)
