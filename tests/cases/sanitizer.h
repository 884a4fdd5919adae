// SPDX-License-Identifier: Apache-2.0
// Whether this is compiled for AddressSanitizer, of which gcc defines a macro and clang has a feature.
#pragma once

#if defined(__SANITIZE_ADDRESS__)
#define ATTUNE_CASES_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define ATTUNE_CASES_ASAN 1
#endif
#endif

namespace attune::cases {

#ifdef ATTUNE_CASES_ASAN
constexpr bool kAddressSanitizer = true;
#else
constexpr bool kAddressSanitizer = false;
#endif

}  // namespace attune::cases
