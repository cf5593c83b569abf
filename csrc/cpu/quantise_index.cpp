// Values of the FP4 index flavour: codes and back (codec.h).
#include "deepinfer/codec.h"

namespace deepinfer {
namespace DI_NAME {

template <class T> void quantise(const T* x, int64_t groups, T* out) {
  split(groups, 2048, [&](int64_t begin, int64_t end) {
    for (int64_t g = begin; g < end; g++) {
      uint8_t record[17];
      encode_index(x + 32 * g, 32, record);
      decode_index(record, 32, out + 32 * g);
    }
  });
}

}  // namespace DI_NAME
}  // namespace deepinfer

using namespace deepinfer::DI_NAME;

// x, out of type `type`, `groups` times 32.
DI_OP(quantise_index)(const void* x, int type, int64_t groups, void* out) {
  if (type == kBf16)
    quantise((const bf16*)x, groups, (bf16*)out);
  else
    quantise((const float*)x, groups, (float*)out);
  return kOk;
}
DI_CAPTURED(quantise_index)
