// W4A16 product for many tokens (SM90): out[m][n] = alpha[n] * sum_k x[m][k] w[n][k] + bias[n].
//
// One CTA makes tiles of 128 rows (of the weight) x TOKENS tokens. A producer warp copies 64 columns at a time into a
// ring: x by a tensor map with 128-byte swizzle, packed weights by plain bulk copies. Two warpgroups each turn 64 rows
// of packed weight into bf16 registers and feed them to wgmma as its A operand, one step ahead of the tensor cores.
// With few tiles, CTAs split the columns; partial sums go through a workspace and the last to arrive adds them in order.
#include <cuda.h>

#include "nvfp4.cuh"
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

constexpr int kConsumers = 256;
constexpr int kWeightStage = 2 * kBlockBytes;
constexpr int kTokenGroup = 16;    // token tiles that run together, so that their x stays in L2
constexpr int kStagingPitch = 144; // bytes: 64 rows in bf16, and 16 to spread tokens over the banks
constexpr int kStaging = 2 * 64 * kStagingPitch;

template <int TOKENS>
struct Ring {
    static constexpr int kTokenStage = TOKENS * 128;
    static constexpr int kStages = (232448 - 1024 - kStaging - 256) / (kTokenStage + kWeightStage) > 8
                                       ? 8
                                       : (232448 - 1024 - kStaging - 256) / (kTokenStage + kWeightStage);
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

__device__ __forceinline__ void copy_tokens(uint32_t destination, const CUtensorMap* map, int column, int token, uint32_t barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
                     destination), "l"(map), "r"(column), "r"(token), "r"(barrier) : "memory");
}

__device__ __forceinline__ void warpgroup_sync(int warpgroup) {
    if (warpgroup == 0) asm volatile("bar.sync 1, 128;" ::: "memory");
    else asm volatile("bar.sync 2, 128;" ::: "memory");
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

template <int TOKENS>
__global__ void __launch_bounds__(384, 1)
    prefill_kernel(const PrefillArguments p, const __grid_constant__ CUtensorMap x_map) {
    using R = Ring<TOKENS>;
    extern __shared__ unsigned char unaligned[];
    __shared__ int arrived[2];
    unsigned char* shared = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
    const uint32_t base = shared_address(shared), full = base + R::kBarriers, empty = full + R::kStages * 8;
    const int units = p.row_tiles * p.token_tiles * p.splits;

    if (threadIdx.x == 0) {
        for (int s = 0; s < R::kStages; ++s) {
            barrier_init(full + s * 8, 1);
            barrier_init(empty + s * 8, kConsumers / 32);
        }
        barrier_init_fence();
    }
    __syncthreads();

    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x != 0) return;
        const auto copy_weights = [&](int stage, const Unit& u, int group) {
            const int blocks = min(2, p.row_blocks - u.row_tile * 2);
            barrier_expect(full + stage * 8, R::kTokenStage + blocks * kBlockBytes);
            for (int b = 0; b < blocks; ++b)
                bulk_copy(base + R::kWeights + stage * kWeightStage + b * kBlockBytes,
                          p.weight + (static_cast<size_t>(u.row_tile * 2 + b) * p.groups + group) * kBlockBytes,
                          kBlockBytes, full + stage * 8);
        };
        const auto copy_x = [&](int stage, const Unit& u, int group) {
            copy_tokens(base + stage * R::kTokenStage, &x_map, group * 64, u.token_tile * TOKENS, full + stage * 8);
        };
        // Weights do not depend on the previous kernel: fill the ring with them before waiting for it.
        int ahead = 0;
        if (static_cast<int>(blockIdx.x) < units) {
            const Unit u = unit_of(p, blockIdx.x);
            const int begin = u.split * p.groups_per_split, end = min(begin + p.groups_per_split, p.groups);
            ahead = min(R::kStages, end - begin);
            for (int i = 0; i < ahead; ++i) copy_weights(i, u, begin + i);
            wait_for_previous_kernel();
            let_next_kernel_start();
            for (int i = 0; i < ahead; ++i) copy_x(i, u, begin + i);
        }
        int count = 0;
        for (int index = blockIdx.x; index < units; index += gridDim.x) {
            const Unit u = unit_of(p, index);
            const int begin = u.split * p.groups_per_split, end = min(begin + p.groups_per_split, p.groups);
            for (int group = begin; group < end; ++group, ++count) {
                if (count < ahead) continue;
                const int stage = count % R::kStages;
                if (count >= R::kStages) barrier_wait(empty + stage * 8, (count / R::kStages - 1) & 1);
                copy_weights(stage, u, group);
                copy_x(stage, u, group);
            }
        }
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    wait_for_previous_kernel();
    const int warpgroup = threadIdx.x / 128 - 1, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    unsigned char* staging = shared + R::kStage + warpgroup * 64 * kStagingPitch;
    const unsigned char* my_weights = shared + R::kWeights + warpgroup * kBlockBytes + warp * kUnitBytes;
    int stage = 0, phase = 0;

    for (int index = blockIdx.x; index < units; index += gridDim.x) {
        const Unit u = unit_of(p, index);
        const int begin = u.split * p.groups_per_split, steps = min(p.groups_per_split, p.groups - begin);
        float d[TOKENS / 2] = {};
        uint32_t a[2][4][4];
        int previous = -1;
        const auto step = [&](uint32_t (&a)[4][4]) {
            barrier_wait(full + stage * 8, phase);
            const unsigned char* unit = my_weights + stage * kWeightStage;
            const uint4 codes = *reinterpret_cast<const uint4*>(unit + lane * 16);
            const uint2 scales = *reinterpret_cast<const uint2*>(unit + 512 + lane / 4 * 8);
            dequantize(codes.x, scale_pair(scales.x, 0), a[0]);
            dequantize(codes.y, scale_pair(scales.x, 1), a[1]);
            dequantize(codes.z, scale_pair(scales.y, 0), a[2]);
            dequantize(codes.w, scale_pair(scales.y, 1), a[3]);
            const uint64_t tokens = token_descriptor(base + stage * R::kTokenStage);
#pragma unroll
            for (int k = 0; k < 4; ++k) pin(a[k]);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 4; ++k) Wgmma<TOKENS>::multiply_add(d, a[k], tokens + k * 2);
            wgmma_commit();
            wgmma_wait<1>();  // the step before this one is done with its stage and its registers
            if (previous >= 0 && lane == 0) barrier_arrive(empty + previous * 8);
            previous = stage;
            if (++stage == R::kStages) stage = 0, phase ^= 1;
        };
        for (int i = 1; i < steps; i += 2) {
            step(a[0]);
            step(a[1]);
        }
        if (steps % 2) step(a[0]);
        wgmma_wait<0>();
        if (lane == 0) barrier_arrive(empty + previous * 8);

        const int first_row = u.row_tile * 128 + warpgroup * 64, first_token = u.token_tile * TOKENS;
        if (first_row >= p.rows) continue;
        if (p.splits > 1) {
            const int tile = (u.token_tile * p.row_tiles + u.row_tile) * 2 + warpgroup;
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

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                                 const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

EncodeTiled encode_tiled() {
    static const EncodeTiled function = [] {
        void* pointer = nullptr;
        cudaDriverEntryPointQueryResult result;
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &pointer, 12000, cudaEnableDefault, &result);
        return reinterpret_cast<EncodeTiled>(pointer);
    }();
    return function;
}

template <int TOKENS>
cudaError_t run(PrefillArguments p, const void* x, int columns, int processors, cudaStream_t stream, bool overlap) {
    p.token_tiles = (p.tokens + TOKENS - 1) / TOKENS;
    CUtensorMap map;
    const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(p.tokens)};
    const cuuint64_t pitch[1] = {static_cast<cuuint64_t>(columns) * 2};
    const cuuint32_t box[2] = {64, TOKENS}, steps[2] = {1, 1};
    const EncodeTiled encode = encode_tiled();
    if (!encode) return cudaErrorNotSupported;
    if (encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(x), sizes, pitch, box, steps,
               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS)
        return cudaErrorInvalidValue;
    const int units = p.row_tiles * p.token_tiles * p.splits;
    return launch(prefill_kernel<TOKENS>, dim3(min(units, processors)), 384, Ring<TOKENS>::kBytes, stream, overlap, p, map);
}

}  // namespace fp4pipe

extern "C" int fp4pipe_prefill(const void* weight, const void* x, const void* alpha, const void* bias, void* out,
                               void* partial, void* arrivals, int tokens, int rows, int columns, int alpha_stride,
                               int tokens_per_tile, int splits, int processors, int overlap, void* stream) {
    using namespace fp4pipe;
    PrefillArguments p{};
    p.weight = static_cast<const unsigned char*>(weight);
    p.alpha = static_cast<const float*>(alpha);
    p.bias = static_cast<const __nv_bfloat16*>(bias);
    p.out = static_cast<__nv_bfloat16*>(out);
    p.partial = static_cast<float*>(partial);
    p.arrivals = static_cast<int*>(arrivals);
    p.tokens = tokens, p.rows = rows, p.alpha_stride = alpha_stride;
    p.row_tiles = (rows + 127) / 128, p.row_blocks = (rows + 63) / 64, p.groups = (columns + 63) / 64;
    p.groups_per_split = (p.groups + splits - 1) / splits;
    p.splits = (p.groups + p.groups_per_split - 1) / p.groups_per_split;
    const auto s = static_cast<cudaStream_t>(stream);
    switch (tokens_per_tile) {
        case 64: return run<64>(p, x, columns, processors, s, overlap != 0);
        case 128: return run<128>(p, x, columns, processors, s, overlap != 0);
        case 256: return run<256>(p, x, columns, processors, s, overlap != 0);
        default: return cudaErrorInvalidConfiguration;
    }
}
