// Functions between TIDE_TARGET(...) and TIDE_TARGET_END are compiled for the instruction sets named, whatever the
// compiler's flags. Standard headers go in front: what they define must run everywhere. Lambdas do not take part.
#pragma once

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // in GCC's own intrinsics: gcc.gnu.org/PR105593
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#define TIDE_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define TIDE_TARGET(names) TIDE_PRAGMA(clang attribute push(__attribute__((target(names))), apply_to = function))
#define TIDE_TARGET_END TIDE_PRAGMA(clang attribute pop)
#else
#define TIDE_TARGET(names) TIDE_PRAGMA(GCC push_options) TIDE_PRAGMA(GCC target(names))
#define TIDE_TARGET_END TIDE_PRAGMA(GCC pop_options)
#endif

// For the levels beyond AVX2, whose instructions a build for tests may emulate.
#ifdef TIDE_EMULATE_WIDE
#define TIDE_TARGET_WIDE(names) TIDE_TARGET("avx2,fma,f16c")
#else
#define TIDE_TARGET_WIDE(names) TIDE_TARGET(names)
#endif
