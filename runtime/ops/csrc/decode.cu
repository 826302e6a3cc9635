// W4A16 product for few tokens (M <= 32): out[m][n] = alpha[n] * sum_k x[m][k] w[n][k] + bias[n].
//
// The weight is the 16-row operand of mma.m16n8k16, tokens the 8-column one. Each warp streams its own part of the
// weight and of x from global memory straight into registers, two stages ahead, without synchronising with any other.
// Warps of a CTA share rows and split columns WK ways, CTAs of a cluster split columns further; sums meet in shared
// memory, across the cluster too, and are added in a fixed order, so results never depend on timing.
#include "nvfp4.cuh"

namespace fp4pipe {

struct DecodeArguments {
    const unsigned char* weight;
    const __nv_bfloat16* x;
    const float* alpha;
    const __nv_bfloat16* bias;  // may be null
    __nv_bfloat16* out;
    int tokens, rows, columns;  // M, N, K
    int alpha_stride;           // 0 when one alpha serves every row
    int row_tiles;              // 16-row tiles in all
    int groups;                 // 64-column groups in all
    int tiles_per_cta, groups_per_cta;
    int column_warps;           // WK
};

__device__ __forceinline__ uint4 load_codes(const unsigned char* address) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address));
    return v;
}

// Scales of a lane for COUNT units side by side, two units a word.
template <int COUNT>
__device__ __forceinline__ void load_scales(uint32_t (&v)[(COUNT + 1) / 2], const unsigned char* address) {
    if constexpr (COUNT == 4)
        asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "l"(address));
    else if constexpr (COUNT == 2)
        asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v[0]) : "l"(address));
    else
        asm volatile("{.reg .u16 s;\n\tld.global.nc.L1::no_allocate.u16 s, [%1];\n\tcvt.u32.u16 %0, s;}" : "=r"(v[0]) : "l"(address));
}

// Sixteen columns of x, as eight pairs. An ordinary load: the kernel before this one may have written them.
__device__ __forceinline__ void load_x(uint32_t (&v)[8], const unsigned char* address) {
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "l"(address) : "memory");
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v[4]), "=r"(v[5]), "=r"(v[6]), "=r"(v[7]) : "l"(address + 16) : "memory");
}

__device__ __forceinline__ float2 load_from_cta(uint32_t address, int rank) {
    float2 v;
    asm volatile("{.reg .b32 remote;\n\tmapa.shared::cluster.u32 remote, %2, %3;\n\t"
                 "ld.shared::cluster.v2.f32 {%0, %1}, [remote];}"
                 : "=f"(v.x), "=f"(v.y) : "r"(address), "r"(rank) : "memory");
    return v;
}

__device__ __forceinline__ void multiply_add(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// NT: groups of 8 tokens. TM: 16-row tiles of a warp. SG: column groups of a stage, a divisor of every CTA's share.
template <int NT, int TM, int SG, int MAX_WARPS>
__global__ void __launch_bounds__(MAX_WARPS * 32, 1) decode_kernel(const DecodeArguments p) {
    extern __shared__ __align__(128) float buffer[];
    constexpr int kSlots = SG == 1 ? 2 : 1;  // stages of x in flight: with one group a stage, one is too close
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, threads = blockDim.x;
    const int wk = warp % p.column_warps, wm = warp / p.column_warps;
    const int first_tile = blockIdx.x * p.tiles_per_cta, tile = first_tile + wm * TM;
    const int first_group = blockIdx.y * p.groups_per_cta;
    const int cta_groups = tile < p.row_tiles ? min(p.groups_per_cta, p.groups - first_group) : 0;
    const int step = p.column_warps * SG;  // groups from one of a warp's stages to its next

    // Weights do not depend on the previous kernel: fetch first, wait afterwards. TM divides 4 and tiles_per_cta, so
    // a warp's tiles lie side by side in one block of the layout, which is padded to 64 rows.
    const unsigned char* block = p.weight + (static_cast<size_t>(tile / 4) * p.groups + first_group + wk * SG) * kBlockBytes;
    const unsigned char* next_codes = block + tile % 4 * kUnitBytes + (t * 8 + g) * 16;
    const int to_scales = kScalesOffset - tile % 4 * kUnitBytes + tile % 4 * 2 - (t * 8 + g) * 8;
    uint4 codes[2][SG][TM];
    uint32_t scales[2][SG][(TM + 1) / 2];
    const auto fetch_codes = [&](int slot, int q, int j) {
        codes[slot][q][j] = load_codes(next_codes + q * kBlockBytes + j * kUnitBytes);
    };
    const auto fetch_scales = [&](int slot, int q) {
        load_scales<TM>(scales[slot][q], next_codes + to_scales + q * kBlockBytes);
    };
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
        if (wk * SG + slot * step < cta_groups) {
#pragma unroll
            for (int q = 0; q < SG; ++q) {
                fetch_scales(slot, q);
#pragma unroll
                for (int j = 0; j < TM; ++j) fetch_codes(slot, q, j);
            }
        }
        next_codes += step * kBlockBytes;
    }

    // Thread -> two rows of the output, which rank of the cluster finishes them, and the first of its tokens.
    const int pairs = p.tiles_per_cta * 8, splits = gridDim.y, rank = blockIdx.y;
    const int my_pairs = (pairs + splits - 1) / splits, pair = rank * my_pairs + threadIdx.x % my_pairs;
    const int token_step = threads / my_pairs, n = first_tile * 16 + pair * 2;
    const int first_token = threadIdx.x / my_pairs < token_step && pair < pairs && n < p.rows ? threadIdx.x / my_pairs : p.tokens;
    float alpha0 = 0.0f, alpha1 = 0.0f, bias0 = 0.0f, bias1 = 0.0f;
    if (first_token < p.tokens) {
        alpha0 = p.alpha[n * p.alpha_stride] * kWeightExponent, alpha1 = p.alpha[(n + 1) * p.alpha_stride] * kWeightExponent;
        if (p.bias) bias0 = __bfloat162float(p.bias[n]), bias1 = __bfloat162float(p.bias[n + 1]);
    }

    wait_for_previous_kernel();
    let_next_kernel_start();
    const unsigned char* x_rows[NT];  // tokens past M read the last one again; nothing is kept of their columns
#pragma unroll
    for (int i = 0; i < NT; ++i)
        x_rows[i] = reinterpret_cast<const unsigned char*>(p.x + static_cast<size_t>(min(i * 8 + g, p.tokens - 1)) * p.columns) + t * 32;
    uint32_t x[kSlots][SG][NT][8];
    const auto fetch_x = [&](int slot, int q, int group) {
        const int column = (first_group + group) * 64;
        if (SG > 1 || column + 64 <= p.columns) {
#pragma unroll
            for (int i = 0; i < NT; ++i) load_x(x[slot % kSlots][q][i], x_rows[i] + column * 2);
        } else {  // columns past K: zero codes there, but NaN * 0 is NaN
#pragma unroll
            for (int i = 0; i < NT; ++i) {
#pragma unroll
                for (int v = 0; v < 8; ++v) x[slot % kSlots][q][i][v] = 0;
                if (column + t * 16 < p.columns) load_x(x[slot % kSlots][q][i], x_rows[i] + column * 2);
            }
        }
    };
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
        if (wk * SG + slot * step < cta_groups) {
#pragma unroll
            for (int q = 0; q < SG; ++q) fetch_x(slot, q, wk * SG + slot * step + q);
        }
    }

    float sums[TM][NT][4] = {};
    for (int stage = wk * SG; stage < cta_groups; stage += 2 * step) {
#pragma unroll
        for (int slot = 0; slot < 2; ++slot) {
            const int first = stage + slot * step;
            if (first >= cta_groups) break;
            const bool more = first + 2 * step < cta_groups;
#pragma unroll
            for (int q = 0; q < SG; ++q) {
                const auto& pairs_of_x = x[slot % kSlots][q];
                uint32_t both_scales[TM];
#pragma unroll
                for (int j = 0; j < TM; ++j) both_scales[j] = scale_pair(scales[slot][q][j / 2], j % 2);
                if (more) fetch_scales(slot, q);
#pragma unroll
                for (int j = 0; j < TM; ++j) {
                    const uint4 words = codes[slot][q][j];
#pragma unroll
                    for (int c = 0; c < 4; c += 2) {
                        // Registers 0, 1 of two words side by side meet neighbouring pairs of x, as the MMA wants them.
                        uint32_t a[4], b[4];
                        dequantize(c ? words.z : words.x, both_scales[j], a);
                        dequantize(c ? words.w : words.y, both_scales[j], b);
                        if (c == 2 && more) fetch_codes(slot, q, j);  // at once, so that two whole stages stay in flight
#pragma unroll
                        for (int i = 0; i < NT; ++i) {
                            multiply_add(sums[j][i], a[0], a[1], b[0], b[1], pairs_of_x[i][c], pairs_of_x[i][c + 1]);
                            multiply_add(sums[j][i], a[2], a[3], b[2], b[3], pairs_of_x[i][c + 4], pairs_of_x[i][c + 5]);
                        }
                    }
                }
                if (first + kSlots * step < cta_groups) fetch_x(slot, q, first + kSlots * step + q);
            }
            next_codes += step * kBlockBytes;
        }
    }

    // Sums of the warps that split the columns meet in shared memory, [WK][token][row].
    const int stride = p.tiles_per_cta * 16 + 4, size = NT * 8 * stride;
#pragma unroll
    for (int j = 0; j < TM; ++j)
#pragma unroll
        for (int i = 0; i < NT; ++i)
#pragma unroll
            for (int v = 0; v < 4; ++v)
                buffer[wk * size + (i * 8 + t * 2 + v % 2) * stride + (wm * TM + j) * 16 + g + v / 2 * 8] = sums[j][i][v];
    __syncthreads();
    const auto add_warps = [&](int offset) {
        float2 sum = *reinterpret_cast<const float2*>(buffer + offset);
        for (int k = 1; k < p.column_warps; ++k) {
            const float2 other = *reinterpret_cast<const float2*>(buffer + k * size + offset);
            sum.x += other.x, sum.y += other.y;
        }
        return sum;
    };
    if (splits > 1) {
        const int local_step = threads / pairs;
        if (threadIdx.x / pairs < local_step)
            for (int token = threadIdx.x / pairs; token < p.tokens; token += local_step) {
                const int offset = token * stride + threadIdx.x % pairs * 2;
                *reinterpret_cast<float2*>(buffer + offset) = add_warps(offset);
            }
        cluster_sync();
    }
    for (int token = first_token; token < p.tokens; token += token_step) {
        const int offset = token * stride + pair * 2;
        float2 sum;
        if (splits == 1) {
            sum = add_warps(offset);
        } else {
            sum = load_from_cta(shared_address(buffer + offset), 0);
            for (int s = 1; s < splits; ++s) {
                const float2 other = load_from_cta(shared_address(buffer + offset), s);
                sum.x += other.x, sum.y += other.y;
            }
        }
        *reinterpret_cast<__nv_bfloat162*>(p.out + static_cast<size_t>(token) * p.rows + n) =
            __floats2bfloat162_rn(sum.x * alpha0 + bias0, sum.y * alpha1 + bias1);
    }
    if (splits > 1) cluster_sync();  // nobody leaves while its sums are still being read
}

template <int NT, int TM, int SG, int MAX_WARPS>
cudaError_t run(const DecodeArguments& p, dim3 grid, cudaStream_t stream, bool overlap) {
    const int warps = p.tiles_per_cta / TM * p.column_warps;
    if (warps > MAX_WARPS || p.tiles_per_cta % TM || p.tiles_per_cta * 8 > warps * 32) return cudaErrorInvalidConfiguration;
    if (SG > 1 && (p.columns % (64 * SG) || p.groups_per_cta % SG)) return cudaErrorInvalidConfiguration;
    const size_t shared = static_cast<size_t>(p.column_warps) * NT * 8 * (p.tiles_per_cta * 16 + 4) * 4;
    return launch(decode_kernel<NT, TM, SG, MAX_WARPS>, grid, warps * 32, shared, stream, overlap, {1, grid.y, 1}, p);
}

}  // namespace fp4pipe

// tiles_per_warp, groups_per_stage and column_warps choose the shape of a CTA, splits how many share a row range.
extern "C" int fp4pipe_decode(const void* weight, const void* x, const void* alpha, const void* bias, void* out,
                              int tokens, int rows, int columns, int alpha_stride, int tiles_per_warp,
                              int groups_per_stage, int tiles_per_cta, int column_warps, int splits, int overlap,
                              void* stream) {
    using namespace fp4pipe;
    const int row_tiles = (rows + 15) / 16, groups = (columns + 63) / 64;
    const DecodeArguments p{static_cast<const unsigned char*>(weight), static_cast<const __nv_bfloat16*>(x),
                            static_cast<const float*>(alpha), static_cast<const __nv_bfloat16*>(bias),
                            static_cast<__nv_bfloat16*>(out), tokens, rows, columns, alpha_stride, row_tiles, groups,
                            tiles_per_cta, (groups + splits - 1) / splits, column_warps};
    const dim3 grid((row_tiles + tiles_per_cta - 1) / tiles_per_cta, splits);
    const auto s = static_cast<cudaStream_t>(stream);
    const int nt = tokens <= 8 ? 1 : tokens <= 16 ? 2 : 4;
    if (tokens > 32) return cudaErrorInvalidConfiguration;
#define FP4PIPE_CASE(NT, TM, SG, WARPS) \
    if (nt == NT && tiles_per_warp == TM && groups_per_stage == SG) return run<NT, TM, SG, WARPS>(p, grid, s, overlap != 0);
    FP4PIPE_CASE(1, 1, 1, 16)
    FP4PIPE_CASE(1, 1, 4, 16)
    FP4PIPE_CASE(1, 2, 1, 16)
    FP4PIPE_CASE(1, 2, 2, 16)
    FP4PIPE_CASE(1, 4, 1, 16)
    FP4PIPE_CASE(2, 1, 1, 16)
    FP4PIPE_CASE(2, 2, 1, 16)
    FP4PIPE_CASE(2, 2, 2, 16)
    FP4PIPE_CASE(2, 4, 1, 12)
    FP4PIPE_CASE(4, 1, 1, 12)
    FP4PIPE_CASE(4, 2, 1, 12)
    FP4PIPE_CASE(4, 4, 1, 8)
#undef FP4PIPE_CASE
    return cudaErrorInvalidConfiguration;
}
