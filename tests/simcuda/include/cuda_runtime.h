/* As CUDA has it: the API without the compiler's part. */
#include "cuda_runtime_api.h"
