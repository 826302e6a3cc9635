// W4A16 product for few tokens (M <= 64): out[m][n] = alpha[n] * sum_k x[m][k] w[n][k] + bias[n].
//
// The weight is the 16-row operand of mma.m16n8k16, tokens the 8-column one. Each warp streams its own units from
// global memory straight into registers, DEPTH units ahead, with no synchronisation; x of the CTA's column range sits
// in shared memory. Warps of a CTA share rows in WM groups and split columns WK ways; their sums meet in shared memory.
// CTAs that split columns (gridDim.y > 1) leave partial sums in a workspace, and the last to arrive adds them in a
// fixed order, so results never depend on timing.
#include "nvfp4.cuh"

namespace fp4pipe {

struct DecodeArguments {
    const unsigned char* weight;
    const __nv_bfloat16* x;
    const float* alpha;
    const __nv_bfloat16* bias;  // may be null
    __nv_bfloat16* out;
    float* partial;             // [gridDim.x][gridDim.y][tokens][rows]
    int* arrivals;              // [gridDim.x], zero between launches
    int tokens, rows, columns;  // M, N, K
    int alpha_stride;           // 0 when one alpha serves every row
    int row_tiles;              // 16-row tiles in all
    int groups;                 // 64-column groups in all
    int tiles_per_cta, groups_per_cta;
    int column_warps;           // WK
};

constexpr int kChunks = 4;  // parts in which x arrives

__device__ __forceinline__ uint4 load_codes(const unsigned char* address) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address));
    return v;
}

__device__ __forceinline__ uint2 load_scales(const unsigned char* address) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(address));
    return v;
}

__device__ __forceinline__ void load_matrices(uint32_t (&b)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(address));
}

__device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// NT: groups of 8 tokens. TM: 16-row tiles a warp holds. GU: column groups it fetches ahead.
template <int NT, int TM, int GU, int MAX_WARPS>
__global__ void __launch_bounds__(MAX_WARPS * 32, 1) decode_kernel(const DecodeArguments p) {
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ uint64_t barriers[kChunks];
    __shared__ bool last;

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int wk = warp % p.column_warps, wm = warp / p.column_warps;
    const int threads = blockDim.x, row_warps = threads / 32 / p.column_warps;
    const int first_tile = blockIdx.x * p.tiles_per_cta;
    const int cta_tiles = min(p.tiles_per_cta, p.row_tiles - first_tile);
    const int first_group = blockIdx.y * p.groups_per_cta;
    const int cta_groups = min(p.groups_per_cta, p.groups - first_group);
    const int steps = wk < cta_groups && wm * TM < cta_tiles ? (cta_groups - wk + p.column_warps - 1) / p.column_warps : 0;

    // Weights do not depend on the previous kernel: fetch first, wait afterwards.
    // TM divides 4 and tiles_per_cta, so a warp's tiles lie in one block of the layout, which is padded to 64 rows.
    const int tile = first_tile + wm * TM;
    const unsigned char* unit = p.weight + tile % 4 * kUnitBytes + lane * 16 +
                                (static_cast<size_t>(tile / 4) * p.groups + first_group + wk) * kBlockBytes;
    const int step_bytes = p.column_warps * kBlockBytes, to_scales = 512 + lane / 4 * 8 - lane * 16;
    uint4 codes[GU][TM];
    uint2 scales[GU][TM];
    const auto fetch = [&](int u, int j) {
        codes[u][j] = load_codes(unit + j * kUnitBytes);
        scales[u][j] = load_scales(unit + to_scales + j * kUnitBytes);
    };
#pragma unroll
    for (int u = 0; u < GU; ++u) {
        if (u < steps) {
#pragma unroll
            for (int j = 0; j < TM; ++j) fetch(u, j);
            unit += step_bytes;
        }
    }

    const int chunk_groups = (cta_groups + kChunks - 1) / kChunks;
    const int pitch = p.groups_per_cta * 128 + 16;  // bytes; the 16 spread rows over the banks
    const int first_column = first_group * 64;
    const int cta_columns = min(cta_groups * 64, p.columns - first_column);
    const uint32_t barrier = shared_address(barriers);
    if (threadIdx.x == 0) {
        for (int c = 0; c < kChunks; ++c) barrier_init(barrier + c * 8, 1);
        barrier_init_fence();
    }
    const int padding = cta_groups * 64 - cta_columns;  // columns past K: zero codes there, but NaN * 0 is NaN
    for (int i = threadIdx.x; i < padding * p.tokens; i += threads)
        *reinterpret_cast<__nv_bfloat16*>(shared + i / padding * pitch + (cta_columns + i % padding) * 2) = __float2bfloat16(0.0f);
    __syncthreads();
    wait_for_previous_kernel();
    let_next_kernel_start();
    if (warp == 0) {
        for (int c = 0; c < kChunks; ++c) {
            const int begin = c * chunk_groups * 64, end = min(begin + chunk_groups * 64, cta_columns);
            if (begin >= end) break;
            const uint32_t bytes = (end - begin) * 2;
            if (lane == 0) barrier_expect(barrier + c * 8, bytes * p.tokens);
            __syncwarp();
            for (int m = lane; m < p.tokens; m += 32)
                bulk_copy(shared_address(shared + m * pitch + begin * 2),
                          p.x + static_cast<size_t>(m) * p.columns + first_column + begin, bytes, barrier + c * 8);
        }
    }

    float sums[TM][NT][4] = {};
    const uint32_t x_address = shared_address(shared) + (lane % 8) * pitch + lane / 8 * 16;
    int ready = 0;
    for (int step = 0; step < steps; step += GU) {
#pragma unroll
        for (int u = 0; u < GU; ++u) {
            if (step + u >= steps) break;
            const int group = wk + (step + u) * p.column_warps;
            while (ready * chunk_groups <= group) barrier_wait(barrier + 8 * ready++, 0);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint32_t b[NT][4];
#pragma unroll
                for (int n = 0; n < NT; ++n) load_matrices(b[n], x_address + n * 8 * pitch + group * 128 + half * 64);
#pragma unroll
                for (int j = 0; j < TM; ++j) {
                    const uint32_t scale_word = half ? scales[u][j].y : scales[u][j].x;
                    uint32_t a0[4], a1[4];
                    dequantize(half ? codes[u][j].z : codes[u][j].x, scale_pair(scale_word, 0), a0);
                    dequantize(half ? codes[u][j].w : codes[u][j].y, scale_pair(scale_word, 1), a1);
                    if (half && step + u + GU < steps) fetch(u, j);
#pragma unroll
                    for (int n = 0; n < NT; ++n) {
                        multiply_add(sums[j][n], a0, b[n][0], b[n][1]);
                        multiply_add(sums[j][n], a1, b[n][2], b[n][3]);
                    }
                }
            }
            unit += step_bytes;
        }
    }

    // Sums of the warps that split the columns meet in shared memory, [WK][token][row].
    __syncthreads();
    float* buffer = reinterpret_cast<float*>(shared);
    const int buffer_rows = row_warps * TM * 16, stride = buffer_rows + 4;
#pragma unroll
    for (int j = 0; j < TM; ++j)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int token = n * 8 + lane % 4 * 2 + i % 2, row = (wm * TM + j) * 16 + lane / 4 + i / 2 * 8;
                buffer[(wk * NT * 8 + token) * stride + row] = sums[j][n][i];
            }
    __syncthreads();

    const int cta_rows = cta_tiles * 16, values = p.tokens * cta_rows;
    const auto finish = [&](int token, int row, float sum) {
        const int n = first_tile * 16 + row;
        if (n >= p.rows) return;
        float value = sum * (p.alpha[n * p.alpha_stride] * kWeightExponent);
        if (p.bias) value += __bfloat162float(p.bias[n]);
        p.out[static_cast<size_t>(token) * p.rows + n] = __float2bfloat16(value);
    };
    float* mine = p.partial + (static_cast<size_t>(blockIdx.x) * gridDim.y + blockIdx.y) * p.tokens * p.tiles_per_cta * 16;
    for (int i = threadIdx.x; i < values; i += threads) {
        const int token = i / cta_rows, row = i % cta_rows;
        float sum = 0.0f;
        for (int k = 0; k < p.column_warps; ++k) sum += buffer[(k * NT * 8 + token) * stride + row];
        if (gridDim.y == 1) finish(token, row, sum);
        else __stcg(mine + i, sum);
    }
    if (gridDim.y == 1) return;

    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(p.arrivals + blockIdx.x, 1) == gridDim.y - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    const float* first = p.partial + static_cast<size_t>(blockIdx.x) * gridDim.y * p.tokens * p.tiles_per_cta * 16;
    const size_t split_stride = static_cast<size_t>(p.tokens) * p.tiles_per_cta * 16;
    for (int i = threadIdx.x; i < values; i += threads) {
        float sum = 0.0f;
        for (int s = 0; s < gridDim.y; ++s) sum += __ldcg(first + s * split_stride + i);
        finish(i / cta_rows, i % cta_rows, sum);
    }
    if (threadIdx.x == 0) p.arrivals[blockIdx.x] = 0;
}

template <int NT, int TM, int GU, int MAX_WARPS>
cudaError_t run(const DecodeArguments& p, dim3 grid, cudaStream_t stream, bool overlap) {
    const size_t row_warps = (p.tiles_per_cta + TM - 1) / TM, warps = row_warps * p.column_warps;
    if (warps > MAX_WARPS || p.tiles_per_cta % TM) return cudaErrorInvalidConfiguration;
    const size_t x_bytes = static_cast<size_t>(NT) * 8 * (p.groups_per_cta * 128 + 16);
    const size_t sum_bytes = static_cast<size_t>(p.column_warps) * NT * 8 * (row_warps * TM * 16 + 4) * 4;
    return launch(decode_kernel<NT, TM, GU, MAX_WARPS>, grid, static_cast<int>(warps * 32), max(x_bytes, sum_bytes),
                  stream, overlap, p);
}

}  // namespace fp4pipe

// tiles_per_warp and column_warps choose the shape of a CTA, splits the number of CTAs that share a row range.
extern "C" int fp4pipe_decode(const void* weight, const void* x, const void* alpha, const void* bias, void* out,
                              void* partial, void* arrivals, int tokens, int rows, int columns, int alpha_stride,
                              int tiles_per_warp, int tiles_per_cta, int column_warps, int splits, int overlap,
                              void* stream) {
    using namespace fp4pipe;
    const int row_tiles = (rows + 15) / 16, groups = (columns + 63) / 64;
    DecodeArguments p{static_cast<const unsigned char*>(weight), static_cast<const __nv_bfloat16*>(x),
                      static_cast<const float*>(alpha), static_cast<const __nv_bfloat16*>(bias),
                      static_cast<__nv_bfloat16*>(out), static_cast<float*>(partial), static_cast<int*>(arrivals),
                      tokens, rows, columns, alpha_stride, row_tiles, groups, tiles_per_cta,
                      (groups + splits - 1) / splits, column_warps};
    const int used_splits = (groups + p.groups_per_cta - 1) / p.groups_per_cta;
    const dim3 grid((row_tiles + tiles_per_cta - 1) / tiles_per_cta, used_splits);
    const auto s = static_cast<cudaStream_t>(stream);
    const int nt = tokens <= 8 ? 1 : tokens <= 16 ? 2 : tokens <= 32 ? 4 : 8;
#define FP4PIPE_CASE(NT, TM, GU, WARPS) \
    if (nt == NT && tiles_per_warp == TM) return run<NT, TM, GU, WARPS>(p, grid, s, overlap != 0);
    FP4PIPE_CASE(1, 1, 8, 16)
    FP4PIPE_CASE(1, 2, 4, 16)
    FP4PIPE_CASE(1, 4, 2, 16)
    FP4PIPE_CASE(2, 1, 8, 16)
    FP4PIPE_CASE(2, 2, 4, 16)
    FP4PIPE_CASE(2, 4, 2, 16)
    FP4PIPE_CASE(4, 1, 4, 16)
    FP4PIPE_CASE(4, 2, 2, 16)
    FP4PIPE_CASE(4, 4, 2, 8)
    FP4PIPE_CASE(8, 1, 4, 16)
    FP4PIPE_CASE(8, 2, 4, 8)
    FP4PIPE_CASE(8, 4, 1, 8)
#undef FP4PIPE_CASE
    return cudaErrorInvalidConfiguration;
}
