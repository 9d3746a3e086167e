// Attention over float32 on a CPU, with the sums behind the vital signs from the same pass.
//
// For each row i, over the keys j it may see, with a running pivot m = the largest logit so far:
//
//     row_sum  = sum e^(s-m)      weighted = sum e^(s-m) (s-m)
//     squares  = sum e^(2(s-m))   acc      = sum e^(s-m) v
//
// and mean and spread of the scores themselves, about the mean of each tile, so that nothing cancels.
//
// The work is cut into units of ROWS rows of one head. Threads take units from a shared counter, so
// that no thread waits for another before the end.
//
// Plain C++ with the compiler's vector types: no library, no allocation. The threads are torch's own
// OpenMP team, entered through its runtime (GOMP_parallel, which the caller hands in): a second team
// would fight with the first for the cores, whose threads spin for a while after each operator.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, VECTORS = 4;  // 6 x 4 accumulators of 32 registers
#else
constexpr int LANES = 8, VECTORS = 2;  // 6 x 2 accumulators of 16 registers
#endif
constexpr int GROUP = 6;      // rows of a register block
constexpr int ROWS = 96;      // rows of a unit
constexpr int PANEL = 64;     // keys of a packed panel
constexpr int KEYS = 512;     // keys of a tile: ROWS x KEYS scores stay in the second-level cache
constexpr float LOWEST = -1e30f;  // what a hidden pair scores; no visible one comes near it

typedef float Floats __attribute__((vector_size(LANES * sizeof(float))));
typedef float Quarter __attribute__((vector_size(4 * sizeof(float))));
typedef int32_t Ints __attribute__((vector_size(LANES * sizeof(int32_t))));

inline Floats load(const float* from) {
  Floats value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline void store(float* to, Floats value) { std::memcpy(to, &value, sizeof value); }

inline Floats spread(float value) { return value - Floats{}; }

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// Seven of these end a row; lane after lane they take longer than a short row's own work.
inline float sum_of(Floats v) {
  Quarter parts[LANES / 4];
  std::memcpy(parts, &v, sizeof v);
  Quarter total = parts[0] + parts[1];
  if (LANES == 16) total += parts[LANES / 4 - 2] + parts[LANES / 4 - 1];
  return (total[0] + total[2]) + (total[1] + total[3]);
}

inline float largest_of(Floats v) {
  Quarter parts[LANES / 4];
  std::memcpy(parts, &v, sizeof v);
  Quarter top = parts[0];
  for (int i = 1; i < LANES / 4; ++i) top = parts[i] > top ? parts[i] : top;
  const float left = top[0] > top[2] ? top[0] : top[2], right = top[1] > top[3] ? top[1] : top[3];
  return left > right ? left : right;
}

// e^x to within two units in the last place for x <= 0; 0 below the smallest normal number.
// e^x = 2^n e^r with n = round(x / ln 2), |r| <= ln 2 / 2, r in two parts (Cody and Waite).
inline Floats exponential(Floats x) {
  const Floats smallest = spread(-87.33654f);
  const Floats shifter = spread(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  const Floats bounded = x < smallest ? smallest : x;
  const Floats shifted = bounded * 1.44269504f + shifter;
  const Floats whole = shifted - shifter;
  Floats r = bounded - whole * 0.693359375f;
  r = r + whole * 2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;  // minimax polynomial of Cephes' expf
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  Ints bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits << 23) + 0x3f800000;  // the low bits of `shifted` are n
  Floats power;
  std::memcpy(&power, &bits, sizeof power);
  return x < smallest ? Floats{} : p * power;
}

inline float exponential(float x) { return exponential(spread(x))[0]; }

// C [rows, Count * LANES] (+)= A [rows, depth] B [depth, Count * LANES], accumulators in registers.
template <int RowCount, int Count, bool Add>
inline void multiply_block(const float* a, int64_t a_row, const float* b, int64_t b_row, float* c,
                           int64_t c_row, int64_t depth) {
  Floats acc[RowCount][Count];
#pragma GCC unroll 8
  for (int i = 0; i < RowCount; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < Count; ++j) acc[i][j] = Floats{};
  for (int64_t k = 0; k < depth; ++k) {
    Floats right[Count];
#pragma GCC unroll 4
    for (int j = 0; j < Count; ++j) right[j] = load(b + k * b_row + j * LANES);
#pragma GCC unroll 8
    for (int i = 0; i < RowCount; ++i) {
      const Floats left = spread(a[i * a_row + k]);
#pragma GCC unroll 4
      for (int j = 0; j < Count; ++j) acc[i][j] += left * right[j];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < RowCount; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < Count; ++j) {
      float* place = c + i * c_row + j * LANES;
      store(place, Add ? load(place) + acc[i][j] : acc[i][j]);
    }
}

template <int Count, bool Add>
void multiply_columns(const float* a, int64_t a_row, const float* b, int64_t b_row, float* c,
                      int64_t c_row, int64_t rows, int64_t depth) {
  int64_t i = 0;
  for (; i + GROUP <= rows; i += GROUP)
    multiply_block<GROUP, Count, Add>(a + i * a_row, a_row, b, b_row, c + i * c_row, c_row, depth);
  for (; i < rows; ++i)
    multiply_block<1, Count, Add>(a + i * a_row, a_row, b, b_row, c + i * c_row, c_row, depth);
}

// C [rows, columns] (+)= A B; columns is a multiple of LANES.
template <bool Add>
void multiply(const float* a, int64_t a_row, const float* b, int64_t b_row, float* c, int64_t c_row,
              int64_t rows, int64_t depth, int64_t columns) {
  int64_t j = 0;
  for (; j + VECTORS * LANES <= columns; j += VECTORS * LANES)
    multiply_columns<VECTORS, Add>(a, a_row, b + j, b_row, c + j, c_row, rows, depth);
  for (; j + 2 * LANES <= columns; j += 2 * LANES)
    multiply_columns<2, Add>(a, a_row, b + j, b_row, c + j, c_row, rows, depth);
  for (; j < columns; j += LANES)
    multiply_columns<1, Add>(a, a_row, b + j, b_row, c + j, c_row, rows, depth);
}

inline double square(double value) { return value * value; }

inline int64_t clamp(int64_t value, int64_t low, int64_t high) {
  return value < low ? low : value > high ? high : value;
}

// The largest score of a tile's row and the mean of the visible ones.
template <bool Hides>
inline void survey(const float* row, int64_t tile, int64_t visible, float* highest, float* mean) {
  Floats most = load(row), total{};
  for (int64_t j = 0; j < tile; j += LANES) {
    const Floats score = load(row + j);
    most = larger(most, score);
    total += Hides ? (score > LOWEST ? score : Floats{}) : score;
  }
  *highest = largest_of(most);
  *mean = visible > 0 ? sum_of(total) / static_cast<float>(visible) : 0.0f;
}

struct Sums {
  float total, product, square, deviation, spread;
};

// Scores to e^(s - pivot) in place, with every sum that the statistics need.
template <bool Hides>
inline Sums measure(float* row, int64_t tile, float pivot, float mean) {
  Floats total{}, product{}, squares{}, deviation{}, spread{};
  for (int64_t j = 0; j < tile; j += LANES) {
    const Floats score = load(row + j);
    const Floats x = score - pivot;
    const Floats e = exponential(x);
    const Floats y = Hides ? (score > LOWEST ? score - mean : Floats{}) : score - mean;
    total += e;
    product += e * x;
    squares += e * e;
    deviation += y;
    spread += y * y;
    store(row + j, e);
  }
  return {sum_of(total), sum_of(product), sum_of(squares), sum_of(deviation), sum_of(spread)};
}

// Mean and squared deviations of a row's scores, taken together tile by tile (Chan's rule).
struct Moments {
  double count, mean, m2;

  void merge(double number, double other_mean, double other_m2) {
    if (number == 0) return;
    const double together = count + number, delta = other_mean - mean;
    mean += delta * number / together;
    m2 += other_m2 + delta * delta * count * number / together;
    count = together;
  }
};

}  // namespace

extern "C" {

// One slab of a call: batch entries [start, stop), rows [row, row_end), one diagonal. The order and
// the types of the fields are those of `Call` in __init__.py.
struct Call {
  const float *query, *keys, *values, *factor;
  float *out, *sums;
  double *moments;  // [2, B, H, Q]: mean and squared deviations of the scores
  int64_t query_batch, query_head, query_row;    // strides of query [B, H, Q, D]
  int64_t out_batch, out_head, out_row;          // strides of out [B, H, Q, V]
  int64_t heads, groups, queries, width;         // H, G, Q, D
  int64_t panels, value_width, value_room;       // keys [B, G, panels, D, 64]; values [B, G, 64 panels, room]
  int64_t batches;                               // B: sums is [5, B, H, Q]
  int64_t start, stop, row, row_end;
  int64_t first, last, offset, left, right;      // left, right < 0: unlimited
  int64_t statistics;                            // 0: only max and sum
  const float *query_norms, *key_norms;          // norms of the rows [B, H, Q] and [B, G, K]
  float *floats;                                 // [13, entries, H]
  int64_t *counts;                               // [6, entries, H]
  int64_t entries, entry, key_count;             // this slab's first entry; K
  const uint8_t* mask;                           // bool, true: may be seen; null: no mask
  int64_t mask_batch, mask_head, mask_row, mask_key;  // its strides, 0 where it is broadcast
  int64_t* seen;                                 // [B, H, Q]: visible keys of each row, with a mask
  const float* sinks;                            // [B, H]: logit of one more outcome; null: none
  float* scratch;                                // [threads, scratch_size]
  int64_t tickets, counter;                      // threads that have come, units taken

  // Row i may see the keys [low, high).
  int64_t low(int64_t i) const { return left < 0 ? first : clamp(i + offset - left, first, last); }
  int64_t high(int64_t i) const { return right < 0 ? last : clamp(i + offset + right + 1, first, last); }
};

// The head's vital signs from its rows, in the order of FLOAT_FIELDS and COUNT_FIELDS of measure.py.
static void summarise(void* data) {
  Call& c = *static_cast<Call*>(data);
  const int64_t plane = c.batches * c.heads * c.queries;
  const int64_t all = c.entries * c.heads;
  for (;;) {
    const int64_t unit = __atomic_fetch_add(&c.counter, 1, __ATOMIC_RELAXED);
    if (unit >= (c.stop - c.start) * c.heads) return;
    const int64_t batch = c.start + unit / c.heads, head = unit % c.heads;
    const int64_t base = (batch * c.heads + head) * c.queries;
    Moments logits{};
    double top = -INFINITY, variance = 0, entropy = 0, ratio = 0, squares = 0, top_p = 0, sink = 0, sunk = 0;
    double query = 0;
    int64_t rows = 0, nonfinite = 0, several = 0, saturated = 0;
    for (int64_t row = c.row; row < c.row_end; ++row) {
      const int64_t i = base + row, seen = c.mask ? c.seen[i] : c.high(row) - c.low(row);
      if (seen <= 0) continue;
      const double keys_sum = c.sums[plane + i], n = static_cast<double>(seen);
      double own = std::log(keys_sum) - c.sums[2 * plane + i] / keys_sum, share = 1, off = 0;
      if (c.sinks) {  // one more outcome: the keys keep `share` of the probability
        const double logit = c.sinks[batch * c.heads + head] - static_cast<double>(c.sums[i]);
        const double gap = logit - std::log(keys_sum);  // ln(off / share)
        share = 1 / (1 + std::exp(gap));
        off = 1 / (1 + std::exp(-gap));
        own = share * own + (share > 0 ? -share * std::log(share) : 0) + (off > 0 ? -off * std::log(off) : 0);
      }
      const double sum = keys_sum / share;
      if (!std::isfinite(c.sums[i] + own) || (c.sinks && !(c.sinks[batch * c.heads + head] < INFINITY))) {
        ++nonfinite;
        continue;
      }
      own = own > 0 ? own : 0;
      ++rows;
      top = c.sums[i] > top ? c.sums[i] : top;
      logits.merge(n, c.moments[i], c.moments[plane + i]);
      variance += c.moments[plane + i] / n;
      entropy += own;
      const int64_t outcomes = seen + (c.sinks ? 1 : 0);
      if (outcomes > 1) {
        ++several;
        ratio += own / std::log(static_cast<double>(outcomes));
      }
      squares += c.sums[3 * plane + i] / (sum * sum) + off * off;
      sunk += off;
      top_p += 1 / sum;  // the pivot is the largest score
      saturated += 1 / sum > 0.99;
      const double at_first = c.sums[4 * plane + i];
      if (at_first > LOWEST) sink += std::exp(at_first - c.sums[i]) / sum;
      query += square(c.query_norms[i]);
    }
    double key = 0;
    const int64_t group = batch * c.groups + head / (c.heads / c.groups);
    for (int64_t j = c.first; j < c.last; ++j) key += square(c.key_norms[group * c.key_count + j]);
    const double one = rows ? 1.0 / rows : 0.0, keys = static_cast<double>((c.last - c.first) * c.width);
    const double floats[] = {top,
                             logits.mean,
                             logits.count ? std::sqrt(logits.m2 / logits.count) : 0.0,
                             std::sqrt(variance * one),
                             entropy * one,
                             several ? ratio / several : 0.0,
                             squares * one,
                             top_p * one,
                             saturated * one,
                             sink * one,
                             sunk * one,
                             std::sqrt(query * one / c.width),
                             keys > 0 ? std::sqrt(key / keys) : 0.0};
    const int64_t counts[] = {rows,    static_cast<int64_t>(logits.count), nonfinite,
                              several, rows * c.width,                     (c.last - c.first) * c.width};
    const int64_t place = (c.entry + batch - c.start) * c.heads + head;
    for (int f = 0; f < 13; ++f) c.floats[f * all + place] = static_cast<float>(floats[f]);
    for (int f = 0; f < 6; ++f) c.counts[f * all + place] = counts[f];
  }
}

// Floats of scratch that a thread needs.
int64_t scratch_size(const Call* call) {
  return ROWS * (KEYS + call->width + call->value_room) + 5 * ROWS + 64;
}

static void attend(void* data) {
  Call& c = *static_cast<Call*>(data);
  float* scratch = c.scratch + __atomic_fetch_add(&c.tickets, 1, __ATOMIC_RELAXED) * scratch_size(&c);
  const int64_t room = c.values ? c.value_room : 0;
  float* scores = scratch;                    // [ROWS, KEYS]
  float* rows = scores + ROWS * KEYS;         // [ROWS, D]: the queries times their factor
  float* acc = rows + ROWS * c.width;         // [ROWS, room]
  float* top = acc + ROWS * c.value_room;     // one value a row from here on
  float *sum = top + ROWS, *weighted = sum + ROWS, *squares = weighted + ROWS, *at_first = squares + ROWS;
  Moments spreads[ROWS];
  int64_t seen[ROWS];  // visible keys, counted where there is a mask
  const int64_t entries = c.stop - c.start;
  const int64_t pieces = (c.row_end - c.row + ROWS - 1) / ROWS;
  const int64_t units = pieces * entries * c.heads;
  const int64_t plane = c.batches * c.heads * c.queries;
  for (;;) {
    const int64_t unit = __atomic_fetch_add(&c.counter, 1, __ATOMIC_RELAXED);
    if (unit >= units) return;
    // The last rows first: under a causal mask they are the longest.
    const int64_t piece = pieces - 1 - unit / (entries * c.heads);
    const int64_t batch = c.start + unit % (entries * c.heads) / c.heads;
    const int64_t head = unit % c.heads;
    const int64_t begin = c.row + piece * ROWS;
    const int64_t count = clamp(c.row_end - begin, 0, ROWS);
    const int64_t group = batch * c.groups + head / (c.heads / c.groups);
    const float* packed = c.keys + group * c.panels * c.width * PANEL;
    const float* values = c.values ? c.values + group * c.panels * PANEL * room : nullptr;
    const float* factor = c.factor + (batch * c.heads + head) * c.queries + begin;

    const float* query = c.query + batch * c.query_batch + head * c.query_head + begin * c.query_row;
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t d = 0; d < c.width; ++d) rows[i * c.width + d] = query[i * c.query_row + d] * factor[i];
      top[i] = LOWEST;
      at_first[i] = LOWEST;
      sum[i] = weighted[i] = squares[i] = 0.0f;
      spreads[i] = Moments{};
      seen[i] = 0;
    }
    std::memset(acc, 0, sizeof(float) * count * room);

    const int64_t key_end = c.high(begin + count - 1);
    for (int64_t key = c.low(begin) / PANEL * PANEL; key < key_end; key += KEYS) {
      const int64_t tile = key_end - key < KEYS ? (key_end - key + PANEL - 1) / PANEL * PANEL : KEYS;
      for (int64_t column = 0; column < tile; column += PANEL)
        multiply<false>(rows, c.width, packed + (key + column) * c.width, PANEL, scores + column, KEYS,
                        count, c.width, PANEL);
      for (int64_t i = 0; i < count; ++i) {
        float* row = scores + i * KEYS;
        const int64_t from = clamp(c.low(begin + i) - key, 0, tile), to = clamp(c.high(begin + i) - key, 0, tile);
        // The rest of the row is hidden: e^(s-m) would be 0, which only the values would have to see.
        const int64_t ends = to / LANES * LANES + (to % LANES || !to ? LANES : 0);
        const int64_t reach = values || !c.statistics ? tile : ends;
        for (int64_t j = 0; j < from; ++j) row[j] = LOWEST;
        for (int64_t j = to < from ? from : to; j < reach; ++j) row[j] = LOWEST;
        int64_t visible = to > from ? to - from : 0;
        if (c.mask) {
          const uint8_t* mask = c.mask + batch * c.mask_batch + head * c.mask_head + (begin + i) * c.mask_row;
          for (int64_t j = from; j < to; ++j)
            if (!mask[(key + j) * c.mask_key]) {
              row[j] = LOWEST;
              --visible;
            }
          seen[i] += visible;
        }
        if (c.first >= key && c.first < key + tile)
          at_first[i] = c.first < key + reach ? row[c.first - key] : LOWEST;
        const bool hides = visible < reach;
        float highest, mean;
        hides ? survey<true>(row, reach, visible, &highest, &mean)
              : survey<false>(row, reach, visible, &highest, &mean);
        const float before = top[i] <= LOWEST ? 0.0f : top[i];
        if (highest > top[i]) {
          const float shrink = top[i] <= LOWEST ? 0.0f : exponential(top[i] - highest);
          weighted[i] = (weighted[i] + sum[i] * (before - highest)) * shrink;
          squares[i] *= shrink * shrink;
          sum[i] *= shrink;
          for (int64_t d = 0; d < room; ++d) acc[i * room + d] *= shrink;
          top[i] = highest;
        }
        const float pivot = top[i] <= LOWEST ? 0.0f : top[i];
        if (c.statistics) {
          const Sums found = hides ? measure<true>(row, reach, pivot, mean)
                                    : measure<false>(row, reach, pivot, mean);
          sum[i] += found.total;
          weighted[i] += found.product;
          squares[i] += found.square;
          if (visible) {
            const double n = static_cast<double>(visible), shift = found.deviation / n;
            const double m2 = found.spread - shift * found.deviation;  // squares may underflow
            spreads[i].merge(n, mean + shift, m2 < 0 ? 0 : m2);
          }
        } else {
          Floats total{};
          for (int64_t j = 0; j < tile; j += LANES) {
            const Floats e = exponential(load(row + j) - pivot);
            total += e;
            store(row + j, e);
          }
          sum[i] += sum_of(total);
        }
      }
      // Panel by panel: a panel of values stays in the first-level cache, and short sums of
      // sums round less than one long chain.
      if (values)
        for (int64_t column = 0; column < tile; column += PANEL)
          multiply<true>(scores + column, KEYS, values + (key + column) * room, room, acc, room, count,
                         PANEL, room);
    }

    float* sums = c.sums + (batch * c.heads + head) * c.queries + begin;
    double* moments = c.moments + (batch * c.heads + head) * c.queries + begin;
    float* out = c.out + batch * c.out_batch + head * c.out_head + begin * c.out_row;
    for (int64_t i = 0; i < count; ++i) {
      sums[i] = top[i];
      sums[plane + i] = sum[i];
      if (c.statistics) {
        sums[2 * plane + i] = weighted[i];
        sums[3 * plane + i] = squares[i];
        sums[4 * plane + i] = at_first[i];
        moments[i] = spreads[i].mean;
        moments[plane + i] = spreads[i].m2;
      }
      if (c.mask) c.seen[(batch * c.heads + head) * c.queries + begin + i] = seen[i];
      if (!values) continue;
      // A sink far above every score makes the divisor infinite, and the output 0.
      const float sink = c.sinks ? std::exp(c.sinks[batch * c.heads + head] - top[i]) : 0.0f;
      const float divisor = sum[i] == 0.0f ? 1.0f : sum[i] + sink;
      for (int64_t d = 0; d < c.value_width; ++d) out[i * c.out_row + d] = acc[i * room + d] / divisor;
    }
  }
}

typedef void (*Parallel)(void (*)(void*), void*, unsigned threads, unsigned flags);

// Run on `threads` threads of the team behind `parallel`; null: on the calling thread alone.
void run(Parallel parallel, int threads, Call* call) {
  for (void (*work)(void*) : {attend, summarise}) {
    if (work == summarise && !call->statistics) return;
    call->counter = call->tickets = 0;
    parallel && threads > 1 ? parallel(work, call, threads, 0) : work(call);
  }
}

}  // extern "C"
