/* A stand-in for libamd_smi.so: two GPUs, whose state lies in one file that all processes map. fake_amd_smi.py mirrors
 * the layout of `struct state`, and adds a function that answers NOT_SUPPORTED for each that the binding looks up and
 * that is not here. The structures are the beginnings of those of amdsmi.h, version 7.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS = 0, INVAL = 1, NO_PERM = 10, OUT_OF_BOUNDS = 17, NOT_INIT = 32 };
enum { GPUS = 2, LEAST_MHZ = 500, MOST_MHZ = 2100, AUTO = 0, MANUAL = 3, GFX = 0 };

static struct state {
    uint32_t lost, refused;      /* codes that all functions, and all that set something, answer; 0: none */
    uint32_t inside, most_inside; /* calls at the same time */
    uint32_t call_us, hotspot_missing;
    double unit_error; /* of the energy counter; 1: none */
    struct gpu {
        uint32_t least_mhz, most_mhz, level, violations;
        uint64_t cap_uw;
        int64_t at_ns;
        double energy_uj;
    } gpu[GPUS];
} *state;
static pid_t initialised_in;

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static uint32_t clock_mhz(struct gpu *gpu) { return gpu->level == MANUAL ? gpu->most_mhz : MOST_MHZ; }

static double power_w(struct gpu *gpu) {
    double free_w = 100 + 0.3 * clock_mhz(gpu);
    return free_w < gpu->cap_uw * 1e-6 ? free_w : gpu->cap_uw * 1e-6;
}

static void count(struct gpu *gpu) {
    int64_t now = now_ns();
    if (gpu->at_ns) gpu->energy_uj += power_w(gpu) * (now - gpu->at_ns) * 1e-3;
    gpu->at_ns = now;
}

/* A call: how many are inside is counted, so that a test sees whether they came one at a time. */
static struct gpu *entered(void *handle, int *answer) {
    uintptr_t number = (uintptr_t)handle;
    *answer = !state || initialised_in != getpid() || number >> 8 != (uintptr_t)getpid() ? NOT_INIT : (int)state->lost;
    if (*answer) return NULL;
    uint32_t inside = __sync_add_and_fetch(&state->inside, 1);
    if (inside > state->most_inside) state->most_inside = inside;
    if (state->call_us) usleep(state->call_us);
    __sync_sub_and_fetch(&state->inside, 1);
    return &state->gpu[(number & 255) - 1];
}

#define ENTER(handle) int answer; struct gpu *gpu = entered(handle, &answer); if (!gpu) return answer

int amdsmi_init(uint64_t flags) {
    (void)flags;
    int file = open(getenv("FAKE_AMD_STATE") ? getenv("FAKE_AMD_STATE") : "", O_RDWR | O_CLOEXEC);
    if (file < 0) return 34; /* DRIVER_NOT_LOADED */
    state = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    initialised_in = getpid();
    return SUCCESS;
}

int amdsmi_shut_down(void) { return initialised_in = 0, SUCCESS; }

int amdsmi_get_socket_handles(uint32_t *count, void **sockets) {
    if (initialised_in != getpid()) return NOT_INIT;
    *count = GPUS;
    for (uintptr_t i = 0; sockets && i < GPUS; i++) sockets[i] = (void *)(i + 1);
    return SUCCESS;
}

int amdsmi_get_processor_handles(void *socket, uint32_t *count, void **handles) {
    *count = 1;
    if (handles) *handles = (void *)(((uintptr_t)getpid() << 8) + (uintptr_t)socket);
    return SUCCESS;
}

int amdsmi_get_gpu_device_uuid(void *handle, unsigned *size, char *uuid) {
    ENTER(handle);
    (void)size;
    strcpy(uuid, gpu == state->gpu ? "aaff74a1-0000-1000-8018-000000000001" : "bbff74a1-0000-1000-8018-000000000002");
    return SUCCESS;
}

int amdsmi_get_gpu_device_bdf(void *handle, uint64_t *bdf) {
    ENTER(handle);
    return *bdf = (uint64_t)(0xc1 + (gpu - state->gpu)) << 8, SUCCESS;
}

int amdsmi_get_gpu_asic_info(void *handle, char *market_name) {
    ENTER(handle);
    return strcpy(market_name, "AMD Instinct MI300X"), SUCCESS;
}

int amdsmi_get_gpu_driver_info(void *handle, char (*info)[256]) {
    ENTER(handle);
    return strcpy(info[0], "6.12.12"), SUCCESS;
}

int amdsmi_get_gpu_compute_partition(void *handle, char *name, uint32_t room) {
    ENTER(handle);
    (void)room;
    return strcpy(name, "SPX"), SUCCESS;
}

int amdsmi_get_clock_info(void *handle, int type, uint32_t *info) {
    ENTER(handle);
    if (type != GFX) return 2;
    info[0] = clock_mhz(gpu), info[1] = LEAST_MHZ, info[2] = MOST_MHZ;
    return SUCCESS;
}

int amdsmi_get_power_info(void *handle, struct { uint64_t socket; uint32_t current, average; } *info) {
    ENTER(handle);
    info->socket = info->average = 0xFFFF, info->current = (uint32_t)power_w(gpu);
    return SUCCESS;
}

int amdsmi_get_power_cap_info(void *handle, uint32_t sensor, uint64_t *info) {
    ENTER(handle);
    (void)sensor;
    info[0] = gpu->cap_uw, info[1] = info[2] = info[4] = 750000000, info[3] = 0;
    return SUCCESS;
}

int amdsmi_get_energy_count(void *handle, uint64_t *accumulator, float *resolution, uint64_t *at) {
    ENTER(handle);
    count(gpu);
    *resolution = 15.259f, *at = gpu->at_ns;
    *accumulator = (uint64_t)(gpu->energy_uj / 15.259 * state->unit_error);
    return SUCCESS;
}

int amdsmi_get_temp_metric(void *handle, int place, int metric, int64_t *celsius) {
    ENTER(handle);
    (void)metric;
    if (place == 1 && state->hotspot_missing) return 2;
    return *celsius = place == 1 ? 61 : 48, SUCCESS;
}

int amdsmi_get_violation_status(void *handle, uint64_t *status) {
    ENTER(handle);
    uint8_t *active = (uint8_t *)(status + 15); /* prochot, ppt, socket, vr, hbm: one byte each */
    for (int i = 0; i < 6; i++) active[i] = gpu->violations >> i & 1;
    return SUCCESS;
}

int amdsmi_set_gpu_clk_range(void *handle, uint64_t least_mhz, uint64_t most_mhz, int type) {
    ENTER(handle);
    if (state->refused) return state->refused;
    if (type != GFX || least_mhz >= most_mhz || least_mhz < LEAST_MHZ || most_mhz > MOST_MHZ) return INVAL;
    count(gpu);
    gpu->least_mhz = least_mhz, gpu->most_mhz = most_mhz, gpu->level = MANUAL;
    return SUCCESS;
}

int amdsmi_set_gpu_perf_level(void *handle, int level) {
    ENTER(handle);
    if (state->refused) return state->refused;
    count(gpu);
    return gpu->level = level, SUCCESS;
}

int amdsmi_set_power_cap(void *handle, uint32_t sensor, uint64_t cap_uw) {
    ENTER(handle);
    if (state->refused) return state->refused;
    if (sensor || cap_uw > 750000000) return OUT_OF_BOUNDS;
    count(gpu);
    return gpu->cap_uw = cap_uw, SUCCESS;
}
