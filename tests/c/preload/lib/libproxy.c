/* A library with names like the driver's that has nothing to do with it. */
int cudnnCreate(void **handle);
int cudnnCreate(void **handle) { return handle ? 77 : 78; }
int cuMemAlloc_v2(unsigned long long *p, unsigned long n);
int cuMemAlloc_v2(unsigned long long *p, unsigned long n) { return p && n ? 79 : 80; }
int cuGetProcAddress_v2(void);
int cuGetProcAddress_v2(void) { return 81; }
