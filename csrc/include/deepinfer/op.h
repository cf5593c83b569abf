// What every op needs: lanes, threads and errors.
#pragma once

#include "deepinfer/simd.h"
#include "deepinfer/threads.h"

namespace deepinfer {
namespace DI_NAME {

enum Error { kOk = 0, kNoMemory = 1, kUnsupported = 2 };
enum Type { kBf16 = 0, kFloat = 1 };  // element types as the bindings number them

// body(task) for each task, on all threads.
template <class Body> inline void parallel(int64_t tasks, const Body& body) {
  di_parallel(
      tasks, [](void* context, int64_t task) { (*(const Body*)context)(task); }, (void*)&body);
}
// body(begin, end) over [0, count) in pieces of `grain`, on all threads; a piece's bounds depend on
// the grain alone.
template <class Body> inline void split(int64_t count, int64_t grain, const Body& body) {
  int64_t tasks = ceil_div(count, grain);
  if (tasks <= 1) {
    if (count) body(int64_t{0}, count);
    return;
  }
  parallel(tasks, [&](int64_t task) { body(task * grain, min(count, (task + 1) * grain)); });
}
template <class T> inline T* scratch(int slot, int64_t count) {
  return (T*)di_scratch(slot, (size_t)count * sizeof(T));
}

// An op called with arguments kept as words of eight bytes, the low ones of which hold the value.
template <class A> inline A word(uint64_t bits) {
  A out;
  memcpy(&out, &bits, sizeof(A));
  return out;
}
template <int... I> struct Indices {};
template <int N, int... I> struct Count : Count<N - 1, N - 1, I...> {};
template <int... I> struct Count<0, I...> {
  typedef Indices<I...> type;
};
template <class... A, int... I>
inline int call(int (*op)(A...), const uint64_t* words, Indices<I...>) {
  return op(word<A>(words[I])...);
}
template <class... A> inline int call(int (*op)(A...), const uint64_t* words) {
  return call(op, words, typename Count<sizeof...(A)>::type());
}

}  // namespace DI_NAME
}  // namespace deepinfer

// `di_<op>_<level>_captured`, how `di_launch` of threads.h calls an op; behind the op in its file.
#define DI_CAPTURED(op)                                                             \
  extern "C" __attribute__((visibility("default"))) int DI_JOIN(                 \
      DI_JOIN(di_##op, DI_NAME), captured)(const uint64_t* words) {                 \
    return deepinfer::DI_NAME::call(DI_JOIN(di_##op, DI_NAME), words);           \
  }
