// One pool of threads for all ops. A task's work never depends on which thread runs it, nor on how
// many there are.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {
// Run f(context, 0) ... f(context, tasks - 1) on the pool's threads and the caller; returns when all
// have ended. Tasks are claimed one after the other.
void di_parallel(int64_t tasks, void (*f)(void*, int64_t), void* context);
// One call of an op: its `di_<op>_<level>_captured` and the words of its arguments.
struct CapturedCall {
  int (*op)(const uint64_t* words);
  const uint64_t* words;
};
// The calls, one after the other, up to the first that fails: its status, and *done those before.
int di_launch(const CapturedCall* calls, int64_t count, int64_t* done);
// Memory of this thread, 64-byte aligned, kept from call to call; `slot` 0 to 8 tells several
// pieces in use at once apart. Null where there is none: ops return kNoMemory.
void* di_scratch(int slot, size_t bytes);
}
