// W4A16 product for many tokens (SM90): out[m][n] = alpha[n] * sum_k x[m][k] w[n][k] + bias[n].
//
// One CTA makes tiles of 64 * GROUPS rows (of the weight) x TOKENS tokens. A producer warp copies 64 columns at a time
// into a ring, x with 128-byte swizzle, packed weights as they are: two tensor copies a stage. GROUPS warpgroups each turn
// 64 rows of packed weight into bf16 registers and feed them to wgmma as its A operand, a step ahead of the tensor cores.
// With few tiles, CTAs split the columns; partial sums go through a workspace and the last to arrive adds them in order.
// CTAs of a cluster make tiles of different rows and the same tokens: each fetches its share of x for all of them.
#include "nvfp4.cuh"
#include "tensor_copies.cuh"
#include "wgmma.cuh"

namespace fp4pipe {

struct PrefillArguments {
    const unsigned char* weight;
    const float* alpha;
    const __nv_bfloat16* bias;  // may be null
    __nv_bfloat16* out;
    float* partial;             // [tile][split][warpgroup][register][thread]
    int* arrivals;              // [tile][warpgroup], zero between launches
    int tokens, rows;           // M, N
    int alpha_stride;           // 0 when one alpha serves every row
    int row_tiles, token_tiles, splits;
    int row_blocks, groups, groups_per_split;
};

constexpr int kTokenGroup = 8;     // token tiles that run together, so that their x stays in L2
constexpr int kStagingPitch = 144; // bytes: 64 rows in bf16, and 16 to spread tokens over the banks

template <int TOKENS, int GROUPS>
struct Ring {
    static constexpr int kTokenStage = TOKENS * 128, kWeightStage = GROUPS * kBlockBytes;
    static constexpr int kStaging = GROUPS * 64 * kStagingPitch;
    static constexpr int kFit = (232448 - 1024 - kStaging - 256) / (kTokenStage + kWeightStage);
    static constexpr int kStages = kFit > 12 ? 12 : kFit;
    static constexpr int kWeights = kStages * kTokenStage;
    static constexpr int kStage = kWeights + kStages * kWeightStage;
    static constexpr int kBarriers = kStage + kStaging;
    static constexpr int kBytes = kBarriers + 2 * kStages * 8 + 1024;  // 1024 to align the base
};

struct Unit {
    int row_tile, token_tile, split;
};

__device__ __forceinline__ Unit unit_of(const PrefillArguments& p, int index) {
    const int per_group = kTokenGroup * p.row_tiles * p.splits;
    const int group = index / per_group, rest = index % per_group;
    const int width = min(kTokenGroup, p.token_tiles - group * kTokenGroup);
    return {rest / width / p.splits, group * kTokenGroup + rest % width, rest / width % p.splits};
}

__device__ __forceinline__ void warpgroup_sync(int warpgroup) {
    asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
}

__device__ __forceinline__ uint32_t pack(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
}

// Sums of a warpgroup, [64 rows][TOKENS], to out[token][row], through shared memory so that rows are written together.
template <int TOKENS>
__device__ __forceinline__ void write_tile(const PrefillArguments& p, float (&d)[TOKENS / 2], int first_row, int first_token,
                                           unsigned char* staging, int warpgroup) {
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const int row = first_row + warp * 16 + lane / 4;
    const int low = min(row, p.rows - 1), high = min(row + 8, p.rows - 1);
    const float alpha0 = p.alpha[low * p.alpha_stride] * kWeightExponent, alpha1 = p.alpha[high * p.alpha_stride] * kWeightExponent;
    const float bias0 = p.bias ? __bfloat162float(p.bias[low]) : 0.0f, bias1 = p.bias ? __bfloat162float(p.bias[high]) : 0.0f;
    const uint32_t address = shared_address(staging) + (lane % 8 + lane / 16 * 8) * kStagingPitch + warp * 32 + lane / 8 % 2 * 16;
#pragma unroll
    for (int part = 0; part < TOKENS / 64; ++part) {
        if (first_token + part * 64 >= p.tokens) break;
#pragma unroll
        for (int j = part * 8; j < part * 8 + 8; j += 2) {
            uint32_t r[4];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                r[2 * i] = pack(d[(j + i) * 4] * alpha0 + bias0, d[(j + i) * 4 + 1] * alpha0 + bias0);
                r[2 * i + 1] = pack(d[(j + i) * 4 + 2] * alpha1 + bias1, d[(j + i) * 4 + 3] * alpha1 + bias1);
            }
            asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                             address + (j % 8) * 8 * kStagingPitch), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
        }
        warpgroup_sync(warpgroup);
#pragma unroll
        for (int i = thread; i < 512; i += 128) {
            const int token = first_token + part * 64 + i / 8, column = first_row + i % 8 * 8;
            if (token < p.tokens && column < p.rows)
                *reinterpret_cast<uint4*>(p.out + static_cast<size_t>(token) * p.rows + column) =
                    *reinterpret_cast<const uint4*>(staging + i / 8 * kStagingPitch + i % 8 * 16);
        }
        warpgroup_sync(warpgroup);
    }
}

__device__ __forceinline__ uint32_t load_scale(uint32_t address) {
    uint32_t v;
    asm volatile("{.reg .u16 s;\n\tld.shared.u16 s, [%1];\n\tcvt.u32.u16 %0, s;}" : "=r"(v) : "r"(address) : "memory");
    return v;
}

// Registers of a producer and of a consumer thread: together what the launch bound leaves at entry.
template <int GROUPS>
__device__ __forceinline__ void shrink() {
    if constexpr (GROUPS == 2) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    else asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
}

template <int GROUPS>
__device__ __forceinline__ void grow() {
    if constexpr (GROUPS == 2) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    else if constexpr (GROUPS == 3) asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
    else asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");
}

// One thread keeps the ring full.
template <int TOKENS, int GROUPS, int CLUSTER>
__device__ __forceinline__ void produce(const PrefillArguments& p, const CUtensorMap* x_map, const CUtensorMap* w_map, uint32_t base,
                                        int rank, int first, int clusters, int units) {
    using R = Ring<TOKENS, GROUPS>;
    constexpr int kShare = TOKENS / CLUSTER;
    const uint32_t full = base + R::kBarriers, empty = full + R::kStages * 8;
    const auto fetch_weights = [&](int stage, int group, int block) {
        barrier_expect(full + stage * 8, R::kTokenStage + R::kWeightStage);
        copy_weights(base + R::kWeights + stage * R::kWeightStage, w_map, group, block, full + stage * 8);
    };
    const auto fetch_x = [&](int stage, int group, int token) {
        copy_tokens<CLUSTER>(base + stage * R::kTokenStage + rank * kShare * 128, x_map, group * 64, token, full + stage * 8);
    };
    int stage = 0, phase = 1;  // the first pass over the ring waits for nobody
    for (int index = first; index < units; index += clusters) {
        const Unit u = unit_of(p, index);
        const int block = (u.row_tile * CLUSTER + rank) * GROUPS, token = u.token_tile * TOKENS + rank * kShare;
        int group = u.split * p.groups_per_split;
        const int end = min(group + p.groups_per_split, p.groups);
        if (index == first) {
            // Weights do not depend on the previous kernel: fill the ring with them before waiting for it.
            const int ahead = min(R::kStages, end - group);
            for (int i = 0; i < ahead; ++i) fetch_weights(i, group + i, block);
            wait_for_previous_kernel();
            let_next_kernel_start();
            for (int i = 0; i < ahead; ++i) fetch_x(i, group + i, token);
            group += ahead, stage = ahead % R::kStages, phase = ahead == R::kStages ? 0 : 1;
        }
        for (; group < end; ++group) {
            barrier_wait(empty + stage * 8, phase);
            fetch_weights(stage, group, block);
            fetch_x(stage, group, token);
            if (++stage == R::kStages) stage = 0, phase ^= 1;
        }
    }
}

// A warpgroup turns packed weights into operands, multiplies, and writes its 64 rows of each tile.
template <int TOKENS, int GROUPS, int CLUSTER>
__device__ __forceinline__ void consume(const PrefillArguments& p, unsigned char* shared, int rank, int first, int clusters,
                                        int units) {
    using R = Ring<TOKENS, GROUPS>;
    __shared__ int arrived[GROUPS];
    const uint32_t base = shared_address(shared), full = base + R::kBarriers, empty = full + R::kStages * 8;
    wait_for_previous_kernel();
    const int warpgroup = threadIdx.x / 128 - 1, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    unsigned char* staging = shared + R::kStage + warpgroup * 64 * kStagingPitch;
    const uint32_t my_block = base + R::kWeights + warpgroup * kBlockBytes;
    const uint32_t my_codes = my_block + warp * kUnitBytes + lane * 16, my_scales = my_block + kScalesOffset + lane / 4 * 8 + warp * 2;
    int stage = 0, phase = 0;
    const auto release = [&](int stage) {
        if (CLUSTER == 1 && lane == 0) barrier_arrive(empty + stage * 8);
        if (CLUSTER > 1 && lane < CLUSTER) barrier_arrive_at(empty + stage * 8, lane);
    };

    for (int index = first; index < units; index += clusters) {
        const Unit u = unit_of(p, index);
        const int begin = u.split * p.groups_per_split, steps = min(p.groups_per_split, p.groups - begin);
        float d[TOKENS / 2] = {};
        uint32_t a[2][4][4];
        int previous = -1;
        const auto step = [&](uint32_t (&a)[4][4]) {
            barrier_wait(full + stage * 8, phase);
            uint32_t codes[4];
            load_matrices(codes, my_codes + stage * R::kWeightStage);
#pragma unroll
            for (int k = 0; k < 4; ++k)
                dequantize(codes[k], scale_pair(load_scale(my_scales + stage * R::kWeightStage + k * 64), 0), a[k]);
            const uint64_t tokens = token_descriptor(base + stage * R::kTokenStage);
#pragma unroll
            for (int k = 0; k < 4; ++k) pin(a[k]);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 4; ++k) Wgmma<TOKENS>::multiply_add(d, a[k], tokens + k * 2);
            wgmma_commit();
            wgmma_wait<1>();  // the step before this one is done with its stage and its registers
            if (previous >= 0) release(previous);
            previous = stage;
            if (++stage == R::kStages) stage = 0, phase ^= 1;
        };
        for (int i = 1; i < steps; i += 2) {
            step(a[0]);
            step(a[1]);
        }
        if (steps % 2) step(a[0]);
        wgmma_wait<0>();
        release(previous);

        const int first_row = ((u.row_tile * CLUSTER + rank) * GROUPS + warpgroup) * 64, first_token = u.token_tile * TOKENS;
        if (first_row >= p.rows) continue;
        if (p.splits > 1) {
            const int tile = ((u.token_tile * p.row_tiles + u.row_tile) * CLUSTER + rank) * GROUPS + warpgroup;
            float* sums = p.partial + static_cast<size_t>(tile) * p.splits * (TOKENS / 2) * 128 + thread;
            float* mine = sums + static_cast<size_t>(u.split) * (TOKENS / 2) * 128;
#pragma unroll
            for (int i = 0; i < TOKENS / 2; ++i) __stcg(mine + i * 128, d[i]);
            __threadfence();
            warpgroup_sync(warpgroup);
            if (thread == 0) arrived[warpgroup] = atomicAdd(p.arrivals + tile, 1);
            warpgroup_sync(warpgroup);
            const bool last = arrived[warpgroup] == p.splits - 1;
            warpgroup_sync(warpgroup);
            if (!last) continue;
            __threadfence();
            if (thread == 0) p.arrivals[tile] = 0;
#pragma unroll
            for (int i = 0; i < TOKENS / 2; ++i) d[i] = __ldcg(sums + i * 128);
            for (int s = 1; s < p.splits; ++s) {
                const float* other = sums + static_cast<size_t>(s) * (TOKENS / 2) * 128;
#pragma unroll
                for (int i = 0; i < TOKENS / 2; ++i) d[i] += __ldcg(other + i * 128);
            }
        }
        write_tile<TOKENS>(p, d, first_row, first_token, staging, warpgroup);
    }
}

template <int TOKENS, int GROUPS, int CLUSTER>
__global__ void __launch_bounds__(128 * GROUPS + 128, 1)
    prefill_kernel(const PrefillArguments p, const __grid_constant__ CUtensorMap x_map,
                   const __grid_constant__ CUtensorMap w_map) {
    using R = Ring<TOKENS, GROUPS>;
    extern __shared__ unsigned char unaligned[];
    unsigned char* shared = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
    const uint32_t base = shared_address(shared), full = base + R::kBarriers, empty = full + R::kStages * 8;
    const int units = p.row_tiles * p.token_tiles * p.splits;
    const int rank = blockIdx.x % CLUSTER, first = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER;

    if (threadIdx.x == 0) {
        for (int s = 0; s < R::kStages; ++s) {
            barrier_init(full + s * 8, 1);
            barrier_init(empty + s * 8, GROUPS * 4 * CLUSTER);
        }
        barrier_init_fence();
    }
    if constexpr (CLUSTER > 1) cluster_sync();
    else __syncthreads();

    if (threadIdx.x < 128) {
        shrink<GROUPS>();
        if (threadIdx.x == 0) produce<TOKENS, GROUPS, CLUSTER>(p, &x_map, &w_map, base, rank, first, clusters, units);
        __syncwarp();
    } else {
        grow<GROUPS>();
        consume<TOKENS, GROUPS, CLUSTER>(p, shared, rank, first, clusters, units);
    }
    if constexpr (CLUSTER > 1) cluster_sync();  // nobody leaves while another may still write here
}

template <int TOKENS, int GROUPS, int CLUSTER>
cudaError_t run(PrefillArguments p, const void* x, int columns, int processors, cudaStream_t stream, bool overlap) {
    p.token_tiles = (p.tokens + TOKENS - 1) / TOKENS;
    p.row_tiles = (p.row_blocks + GROUPS * CLUSTER - 1) / (GROUPS * CLUSTER);
    CUtensorMap x_map, w_map;
    if (!map_tokens(&x_map, x, columns, p.tokens, TOKENS / CLUSTER) || !map_weights(&w_map, p.weight, p.groups, p.row_blocks, GROUPS))
        return cudaErrorInvalidValue;
    const int units = p.row_tiles * p.token_tiles * p.splits;
    return launch(prefill_kernel<TOKENS, GROUPS, CLUSTER>, dim3(min(units, processors / CLUSTER) * CLUSTER),
                  128 * GROUPS + 128, Ring<TOKENS, GROUPS>::kBytes, stream, overlap, {CLUSTER, 1, 1}, p, x_map, w_map);
}

}  // namespace fp4pipe

extern "C" int fp4pipe_prefill(const void* weight, const void* x, const void* alpha, const void* bias, void* out,
                               void* partial, void* arrivals, int tokens, int rows, int columns, int alpha_stride,
                               int tokens_per_tile, int warpgroups, int cluster, int splits, int processors, int overlap, void* stream) {
    using namespace fp4pipe;
    PrefillArguments p{};
    p.weight = static_cast<const unsigned char*>(weight);
    p.alpha = static_cast<const float*>(alpha);
    p.bias = static_cast<const __nv_bfloat16*>(bias);
    p.out = static_cast<__nv_bfloat16*>(out);
    p.partial = static_cast<float*>(partial);
    p.arrivals = static_cast<int*>(arrivals);
    p.tokens = tokens, p.rows = rows, p.alpha_stride = alpha_stride;
    p.row_blocks = (rows + 63) / 64, p.groups = (columns + 63) / 64;
    p.groups_per_split = (p.groups + splits - 1) / splits;
    p.splits = (p.groups + p.groups_per_split - 1) / p.groups_per_split;
    const auto s = static_cast<cudaStream_t>(stream);
#define FP4PIPE_CASE(TOKENS, GROUPS, CLUSTER) \
    if (tokens_per_tile == TOKENS && warpgroups == GROUPS && cluster == CLUSTER) \
        return run<TOKENS, GROUPS, CLUSTER>(p, x, columns, processors, s, overlap != 0);
    FP4PIPE_CASE(64, 2, 1)
    FP4PIPE_CASE(64, 4, 1)
    FP4PIPE_CASE(128, 2, 1)
    FP4PIPE_CASE(128, 2, 2)
    FP4PIPE_CASE(128, 3, 1)
    FP4PIPE_CASE(128, 3, 2)
    FP4PIPE_CASE(256, 2, 1)
    FP4PIPE_CASE(256, 2, 2)
#undef FP4PIPE_CASE
    return cudaErrorInvalidConfiguration;
}
