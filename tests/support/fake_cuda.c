/* A stand-in for libcuda.so.1: its devices are the UUIDs in FAKE_CUDA_UUIDS (32 hexadecimal digits each, commas between);
 * cuInit answers FAKE_CUDA_INIT. As in the real one, only the newer call for a UUID tells that of a MIG instance, which
 * stands after a slash: whole/instance. Calls are left out as in fake_nvml.c. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *device(int ordinal) {
    const char *at = getenv("FAKE_CUDA_UUIDS");
    while (at && *at && ordinal-- > 0) at = (at = strchr(at, ',')) ? at + 1 : NULL;
    return at && *at ? at : NULL;
}

static int read_uuid(const char *at, unsigned char *uuid) {
    for (int i = 0; i < 16; i++) sscanf(at + 2 * i, "%2hhx", &uuid[i]);
    return 0;
}

int cuInit(unsigned flags) { return (void)flags, getenv("FAKE_CUDA_INIT") ? atoi(getenv("FAKE_CUDA_INIT")) : 0; }

int cuDeviceGetCount(int *count) {
    for (*count = 0; device(*count);) ++*count;
    return 0;
}

int cuDeviceGet(int *into, int ordinal) { return *into = ordinal, device(ordinal) ? 0 : 101; }

int cuDeviceGetUuid(unsigned char *uuid, int ordinal) { return read_uuid(device(ordinal), uuid); }

int cuDeviceGetUuid_v2(unsigned char *uuid, int ordinal) {
    const char *whole = device(ordinal);
    return read_uuid(whole[32] == '/' ? whole + 33 : whole, uuid);
}
