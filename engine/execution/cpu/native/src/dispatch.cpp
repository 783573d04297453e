// Which level runs here: the processor's instructions, and whether the system saves their registers.
#include <cpuid.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tape.h"

namespace tide {

namespace {

struct Registers { uint32_t a, b, c, d; };

Registers cpuid(uint32_t leaf, uint32_t sub) {
    Registers r{};
    if (!__get_cpuid_count(leaf, sub, &r.a, &r.b, &r.c, &r.d)) return {};
    return r;
}
bool bit(uint32_t word, int i) { return word >> i & 1; }

uint64_t saved_registers() {  // XCR0
    uint32_t low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return uint64_t(high) << 32 | low;
}

// Linux hands out the tile registers on request, once for the process.
bool tiles_granted() {
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

int highest_level() {
    const Registers basic = cpuid(1, 0), more = cpuid(7, 0), most = cpuid(7, 1);
    const bool xsave = bit(basic.c, 27), fma = bit(basic.c, 12), f16c = bit(basic.c, 29), avx2 = bit(more.b, 5);
    if (!xsave || !fma || !f16c || !avx2) return -1;
    const uint64_t saved = saved_registers();
    if ((saved & 0x6) != 0x6) return -1;
#ifdef TIDE_EMULATE_WIDE
    return TM_AMX;
#endif
    const bool avx512 = bit(more.b, 16) && bit(more.b, 17) && bit(more.b, 30) && bit(more.b, 31);
    if (!avx512 || (saved & 0xe6) != 0xe6) return TM_AVX2;
#ifdef TIDE_EMULATE
    return TM_AMX;
#endif
    if (!bit(most.a, 5)) return TM_AVX512;
    const bool tiles = bit(more.d, 22) && bit(more.d, 24) && (saved & 0x60000) == 0x60000;
    return tiles && tiles_granted() ? TM_AMX : TM_BF16;
}

struct ByteProducts { bool wide, narrow; };  // in AVX-512, in AVX2

ByteProducts byte_products() {
    const bool vnni = bit(cpuid(7, 0).c, 11);
#ifdef TIDE_EMULATE_WIDE
    return {true, true};
#elif defined(TIDE_EMULATE)
    return {vnni, vnni};
#endif
    return {vnni, bit(cpuid(7, 1).a, 4)};
}

}  // namespace

namespace {

const Integers *both_of(int32_t level, int32_t type, int32_t int8) {
    static const ByteProducts products = byte_products();
    if (!kernels_of(level, type)) return nullptr;
    const bool wide = level >= TM_AVX512, narrow = level >= TM_BF16;
    if (int8 == TM_WORDS) return wide ? avx512_words(type, narrow) : avx2_words(type);
    if (int8 != TM_BYTES || !(wide ? products.wide : products.narrow)) return nullptr;
    return wide ? avx512_bytes(type, narrow) : avx2_bytes(type);
}

}  // namespace

const Integers *integers_of(int32_t level, int32_t type, int32_t int8, bool four) {
    const Integers *both = both_of(level, type, int8);
    return both ? both + four : nullptr;
}

const Kernels *kernels_of(int32_t level, int32_t type) {
    static const int highest = highest_level();
    if (level < 0 || level > highest) return nullptr;
    switch (level) {
        case TM_AVX2: return avx2_kernels(type);
        case TM_AVX512: return avx512_kernels(type);
        case TM_BF16: return bf16_kernels(type);
        case TM_AMX: return amx_kernels(type);
        default: return nullptr;
    }
}

}  // namespace tide
