// Whether this machine has what the code was compiled for.

#pragma once

namespace paged {

// Modules are compiled for the CPU they are built on; elsewhere they must refuse, not crash.
inline bool runs_here() {
    bool supported = true;
#ifdef __x86_64__
#ifdef __AVX2__
    supported = supported && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
#ifdef __AVX512F__
    supported = supported && __builtin_cpu_supports("avx512f") &&
                __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                __builtin_cpu_supports("avx512vl");
#endif
#ifdef __AVX512VBMI__
    supported = supported && __builtin_cpu_supports("avx512vbmi");
#endif
#ifdef __AVX512BF16__
    supported = supported && __builtin_cpu_supports("avx512bf16");
#endif
#endif
    return supported;
}

}  // namespace paged
