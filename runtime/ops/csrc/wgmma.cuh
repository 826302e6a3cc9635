// wgmma with the weight as register operand: D[64 rows][N tokens] += A[64][16] * B[16][N], bf16 in, float32 out.
//
// Thread `i` of the warpgroup's warp `w` holds of D, for each group j of 8 tokens, d[4j..4j+3] = rows 16w+g, 16w+g,
// 16w+g+8, 16w+g+8 and tokens 8j+2t, +1, +0, +1, where (g, t) = (i / 4, i % 4) within the warp.
#pragma once

#include <cstdint>

namespace fp4pipe {

// Tokens x 64 columns in shared memory, 128 bytes a token, 128-byte swizzle, base aligned to 1024 bytes.
__device__ __forceinline__ uint64_t token_descriptor(uint32_t address) {
    return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | (uint64_t{1} << 16) | (uint64_t{1024 >> 4} << 32) |
           (uint64_t{1} << 62);
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from moving what computes `registers` below this point, into a running wgmma.
template <int COUNT>
__device__ __forceinline__ void pin(uint32_t (&registers)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

template <int TOKENS>
struct Wgmma;

#define FP4PIPE_8(o) \
    "+f"(d[o]), "+f"(d[o + 1]), "+f"(d[o + 2]), "+f"(d[o + 3]), "+f"(d[o + 4]), "+f"(d[o + 5]), "+f"(d[o + 6]), "+f"(d[o + 7])

template <>
struct Wgmma<64> {
    static __device__ __forceinline__ void multiply_add(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
        asm volatile(
            "{.reg .pred p;\n\tsetp.eq.b32 p, 0, 0;\n\t"
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
            "{%32, %33, %34, %35}, %36, p, 1, 1, 0;}"
            : FP4PIPE_8(0), FP4PIPE_8(8), FP4PIPE_8(16), FP4PIPE_8(24)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
};

template <>
struct Wgmma<128> {
    static __device__ __forceinline__ void multiply_add(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
        asm volatile(
            "{.reg .pred p;\n\tsetp.eq.b32 p, 0, 0;\n\t"
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
            "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
            "{%64, %65, %66, %67}, %68, p, 1, 1, 0;}"
            : FP4PIPE_8(0), FP4PIPE_8(8), FP4PIPE_8(16), FP4PIPE_8(24), FP4PIPE_8(32), FP4PIPE_8(40),
              FP4PIPE_8(48), FP4PIPE_8(56)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
};

template <>
struct Wgmma<256> {
    static __device__ __forceinline__ void multiply_add(float (&d)[128], const uint32_t (&a)[4], uint64_t b) {
        asm volatile(
            "{.reg .pred p;\n\tsetp.eq.b32 p, 0, 0;\n\t"
            "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
            "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
            "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
            "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
            "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
            "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
            "{%128, %129, %130, %131}, %132, p, 1, 1, 0;}"
            : FP4PIPE_8(0), FP4PIPE_8(8), FP4PIPE_8(16), FP4PIPE_8(24), FP4PIPE_8(32), FP4PIPE_8(40),
              FP4PIPE_8(48), FP4PIPE_8(56), FP4PIPE_8(64), FP4PIPE_8(72), FP4PIPE_8(80), FP4PIPE_8(88),
              FP4PIPE_8(96), FP4PIPE_8(104), FP4PIPE_8(112), FP4PIPE_8(120)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
};

#undef FP4PIPE_8

}  // namespace fp4pipe
