// The numbers that the format and its writer fix. They have twins in Python (format/limits.py, kernels/rans.py and
// kernels/reference.py); the binding exports all of them, and kernels/native.py refuses to load if one differs.
#pragma once

#include "types.hpp"

namespace deltasync {

// What a reader accepts.
constexpr int kBlockElementsLog2 = 25;
constexpr u64 kBlockElementsMax = u64{1} << kBlockElementsLog2;
constexpr int kClassesMax = 16;
constexpr int kLanesLog2Max = 5;
constexpr int kVarintBytesMax = 5;

// The entropy coder: bits of a frequency, the least state, and the buckets of numbers.
constexpr int kPrecision = 12;
constexpr u32 kStateMin = 1u << 16;
constexpr int kExact = 16;
constexpr int kBucketsMax = kExact + 2 * 60;

// The state digest: columns in a row of keys.
constexpr u64 kColumns = 1024;

// What the writer chooses. A reader does not depend on these, but the bytes of a payload do.
constexpr int kClassesWanted = 10;
constexpr i64 kClassCostBits = 320;
constexpr u64 kElementsAllBelow = u64{1} << 19, kChangesAllBelow = u64{1} << 15;
// The period is not a power of two, so that the sample does not always fall on the same columns of a matrix.
constexpr u64 kSampleRun = 256, kSampleScale = 124, kSamplePeriod = kSampleRun * kSampleScale;
constexpr u64 kStepBitsWide = 6;

}  // namespace deltasync
