// NVFP4 weights in the tiled form, and how a warp turns them into tensor core operands.
//
// Layout: [N/64][K/64] blocks of 2304 bytes: codes of four units of 16 rows, 512 bytes each, then 256 bytes of scales.
//   codes   word c of the 16 bytes at (8t + g) * 16 holds rows g and g+8, columns 16t + {2c, 2c+1, 2c+8, 2c+9}
//   scales  byte h at ((8t + g) * 4 + unit) * 2 scales row g + 8h of that unit, columns 16t .. 16t+15
// A word is the four A registers of mma.m16n8k16 (and of wgmma) in one of two ways. Read by ldmatrix, step t of a unit is
// the 16 columns of block t in their order. Read 16 bytes a lane (g, t), step c mixes four blocks, lane t always holding
// columns of block t: one pair of scales serves all four steps, and the lane's columns of x lie side by side.
//
// Codes inside a word are spread so that a register is a bf16 pair after few instructions: sign, two exponent bits and
// the mantissa bit land on bits 15, 8, 7, 6 of each half, which reads as the E2M1 value times 2^-126.
//   register 0: in place;  1: rotate left by 10;  2: rotate left by 13;  3: four bits moved by one multiplication.
//
// A block scale is a byte [e0 m2 m1 m0 e4 e3 e2 e1]: five exponent bits (bias 9) and three mantissa bits, so that
// every E4M3 number, subnormal or not, is kept. Doubled into a half and masked it is bf16 bits; the constant exponent
// makes it 2^106 times the scale. Code times scale is then exact in bf16 and equals the weight times 2^-20.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace fp4pipe {

constexpr int kUnitBytes = 512;     // codes of 16 rows x 64 columns
constexpr int kScalesOffset = 2048; // of a block's scales
constexpr int kBlockBytes = 2304;   // 64 rows x 64 columns
constexpr float kWeightExponent = 1048576.0f; // 2^20, undone in the epilogue
constexpr uint32_t kCodeMask = 0x81C081C0u;

// The two scales (rows g and g+8) in half `half` of a word: one in each half of the result.
__device__ __forceinline__ uint32_t scale_pair(uint32_t word, int half) {
    uint32_t out, exponent;
    // Opaque, so that one three-input operation takes mask and exponent together.
    asm("mov.b32 %0, 0x70007000;" : "=r"(exponent));
    asm("lop3.b32 %0, %1, 0x0FF00FF0, %2, 0xEA;" : "=r"(out) : "r"(__byte_perm(word, 0, half ? 0x3322 : 0x1100)), "r"(exponent));
    return out;
}

__device__ __forceinline__ uint32_t multiply_low(uint32_t a, uint32_t scales) {
    uint32_t out;
    asm("{.reg .b16 l, h; .reg .b32 s;\n\t"
        "mov.b32 {l, h}, %2;\n\tmov.b32 s, {l, l};\n\tmul.rn.bf16x2 %0, %1, s;}"
        : "=r"(out) : "r"(a), "r"(scales));
    return out;
}

__device__ __forceinline__ uint32_t multiply_high(uint32_t a, uint32_t scales) {
    uint32_t out;
    asm("{.reg .b16 l, h; .reg .b32 s;\n\t"
        "mov.b32 {l, h}, %2;\n\tmov.b32 s, {h, h};\n\tmul.rn.bf16x2 %0, %1, s;}"
        : "=r"(out) : "r"(a), "r"(scales));
    return out;
}

// A registers of one 16x16 tile, times 2^-20.
__device__ __forceinline__ void dequantize(uint32_t codes, uint32_t scales, uint32_t (&a)[4]) {
    a[0] = multiply_low(codes & kCodeMask, scales);
    a[1] = multiply_high(__funnelshift_l(codes, codes, 10) & kCodeMask, scales);
    a[2] = multiply_low(__funnelshift_l(codes, codes, 13) & kCodeMask, scales);
    a[3] = multiply_high(((codes & 0x001B001Bu) * 0x4108u) & kCodeMask, scales);
}

// Four 8x8 matrices of 16-bit elements, rows from the address each lane gives.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- mbarriers and bulk copies --------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile("{.reg .pred done;\n\t"
                 "again:\n\t"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
                 "@done bra finished;\n\tbra again;\n\tfinished:\n\t}" ::"r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ void bulk_copy(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     destination), "l"(source), "r"(bytes), "r"(barrier) : "memory");
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// ---- programmatic dependent launch ----------------------------------------------------------------------------------

__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ---- host -----------------------------------------------------------------------------------------------------------

// Launch `kernel` so that it may start, and fetch weights, before the previous kernel of the stream has finished.
// CTAs run in clusters of `cluster`.
template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, int threads, size_t shared, cudaStream_t stream,
                   bool overlap, dim3 cluster, Arguments... arguments) {
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {cluster.x, cluster.y, cluster.z};
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = overlap ? 2 : 1;
    return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace fp4pipe
