// Tensor copies of the prefill kernel: the maps that describe x and the packed weight, and the copies by them.
#pragma once

#include <cuda.h>

#include "nvfp4.cuh"

namespace fp4pipe {

// ---- device ---------------------------------------------------------------------------------------------------------

// Copy a box of x to the same place in every CTA of the cluster, and tell each one's barrier.
template <int CLUSTER>
__device__ __forceinline__ void copy_tokens(uint32_t destination, const CUtensorMap* map, int column, int token, uint32_t barrier) {
    if constexpr (CLUSTER == 1)
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
                     "[%1, {%2, %3}], [%4];" ::"r"(destination), "l"(map), "r"(column), "r"(token), "r"(barrier) : "memory");
    else
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                     "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(destination), "l"(map), "r"(column), "r"(token), "r"(barrier),
                     "h"(static_cast<uint16_t>((1 << CLUSTER) - 1)) : "memory");
}

// Copy GROUPS blocks of the packed weight: [block][group * 9 ...][256 bytes].
__device__ __forceinline__ void copy_weights(uint32_t destination, const CUtensorMap* map, int group, int block, uint32_t barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
                 "[%1, {%2, %3, %4}], [%5];" ::"r"(destination), "l"(map), "r"(0), "r"(group * (kBlockBytes / 256)), "r"(block),
                 "r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_arrive_at(uint32_t barrier, int rank) {
    asm volatile("{.reg .b32 remote;\n\tmapa.shared::cluster.u32 remote, %0, %1;\n\t"
                 "mbarrier.arrive.shared::cluster.b64 _, [remote];}" ::"r"(barrier), "r"(rank) : "memory");
}

// ---- host -----------------------------------------------------------------------------------------------------------

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                                 const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

inline EncodeTiled encode_tiled() {
    static const EncodeTiled function = [] {
        void* pointer = nullptr;
        cudaDriverEntryPointQueryResult result;
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &pointer, 12000, cudaEnableDefault, &result);
        return reinterpret_cast<EncodeTiled>(pointer);
    }();
    return function;
}

// x, bf16 [tokens][columns]: boxes of 64 columns x `box` tokens, swizzled as wgmma reads them.
inline bool map_tokens(CUtensorMap* map, const void* x, int columns, int tokens, unsigned box) {
    const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(tokens)};
    const cuuint64_t pitch[] = {static_cast<cuuint64_t>(columns) * 2};
    const cuuint32_t boxes[] = {64, box}, steps[] = {1, 1};
    const EncodeTiled encode = encode_tiled();
    return encode && encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(x), sizes, pitch, boxes, steps,
                            CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                            CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// The packed weight, [row_blocks][groups][2304 bytes]: boxes of `box` blocks of one column group.
inline bool map_weights(CUtensorMap* map, const void* weight, int groups, int row_blocks, unsigned box) {
    const cuuint64_t row = static_cast<cuuint64_t>(groups) * kBlockBytes;
    const cuuint64_t sizes[] = {256, row / 256, static_cast<cuuint64_t>(row_blocks)}, pitch[] = {256, row};
    const cuuint32_t boxes[] = {256, kBlockBytes / 256, box}, steps[] = {1, 1, 1};
    const EncodeTiled encode = encode_tiled();
    return encode && encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, const_cast<void*>(weight), sizes, pitch, boxes, steps,
                            CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                            CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace fp4pipe
