/* A stand-in for libnvidia-ml.so.1: what a driver keeps lies in one file that all processes map, and a script says
 * how it behaves. The script's format is in fake_nvml.py, which also mirrors the layout of `struct state`.
 *
 * A function is left out by renaming it at compile time: cc -DnvmlDeviceGetName=absent_nvmlDeviceGetName ...
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
       ARGUMENT_VERSION_MISMATCH = 25, UNKNOWN = 999 };
enum { GPUS = 16, FUNCTIONS = 64, SETS = 4096, LINES = 1024, CLOCKS = 512 };

/* --- what the driver keeps: mapped by every process, and so outlives each of them */
struct state {
    uint32_t script_version; /* raised by whoever has written the script anew */
    uint32_t unused;
    uint64_t sets; /* how often a setting was made since the file is there */
    struct gpu_state {
        uint32_t locked_min_mhz, locked_max_mhz, memory_mhz, unused; /* 0: not locked */
        uint32_t limit_mw, limit_known;
        int64_t energy_at_ns; /* up to when energy_uj has been counted; 0: not begun */
        double energy_uj;
    } gpu[GPUS];
    struct calls {
        char function[64];
        uint32_t made[GPUS + 1]; /* per GPU; last: those that name no GPU */
    } calls[FUNCTIONS];
    struct set {
        char function[48];
        int32_t gpu, code;
        uint32_t pid, low, high;
        int64_t begun_ns, ended_ns; /* CLOCK_MONOTONIC */
    } set[SETS]; /* the last ones, as a ring */
};

static struct state *state;
static struct stat mapped; /* the file that state is */
static pid_t initialised_in;
static int users;
static double loaded; /* how often the driver had been reloaded when this process initialised */

/* --- locks: a byte of the state file each, on a description of its own, so that they hold between threads, between
 * processes, and fall with the process that is killed */
static int locked(int byte) {
    int fd = open(getenv("FAKE_NVML_STATE"), O_RDWR | O_CLOEXEC);
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
    while (fcntl(fd, F_OFD_SETLKW, &lock) != 0 && fd >= 0) {}
    return fd;
}

static void unlocked(int fd, int byte) {
    struct flock lock = {.l_type = F_UNLCK, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
    fcntl(fd, F_OFD_SETLK, &lock); /* said, not left to close: a fork may hold a copy of fd */
    close(fd);
}

enum { STATE = 0, SETTING = 1 };

/* --- the script */
static char *text;
static struct line { int gpu; char *key, *value; } lines[LINES]; /* gpu -1: any */
static int line_count;
static struct stat seen;
static uint32_t seen_version;

static const char *DEFAULTS =
    "* driver 570.86.15\n* gpus 2\n* name NVIDIA Stand-in\n* idle_w 60\n* w_per_mhz 0.2\n* energy_mj 1000000\n"
    "* energy_step_ms 0\n* temperature_c 40\n* throttle 0\n* limit_mw 100000 700000 700000\n* mig 0\n* persistence 1\n"
    "* virtualization 0\n* profiles 0\n* clocks 1980 1740 1500 1260 1020 780\n* memory_clocks 2619 1593\n"
    "* field_251 0\n* field_74 0\n* field_76 0\n* field_269 0\n* field_270 0\n* field_271 0\n";

static void parse(char *from) {
    for (char *rest = from, *line; (line = strsep(&rest, "\n")) && line_count < LINES;) {
        char *gpu = strsep(&line, " "), *key = line ? strsep(&line, " ") : NULL;
        if (!key || gpu[0] == '#') continue;
        lines[line_count++] = (struct line){gpu[0] == '*' ? -1 : atoi(gpu), key, line ? line : ""};
    }
}

static void read_script(void) {
    struct stat now = {0};
    const char *path = getenv("FAKE_NVML_SCRIPT");
    if (path) stat(path, &now);
    if (text && seen_version == state->script_version && now.st_ino == seen.st_ino &&
        memcmp(&now.st_mtim, &seen.st_mtim, sizeof now.st_mtim) == 0) return;
    seen = now, seen_version = state->script_version;
    size_t defaults = strlen(DEFAULTS), size = 0;
    free(text);
    text = calloc(1, defaults + now.st_size + 2);
    strcpy(text, DEFAULTS);
    FILE *file = path ? fopen(path, "r") : NULL;
    if (file) size = fread(text + defaults, 1, now.st_size, file), fclose(file);
    text[defaults + size] = 0;
    line_count = 0;
    parse(text);
}

static const char *value(int gpu, const char *key) { /* the last line that says it, NULL if none */
    for (int i = line_count - 1; i >= 0; i--)
        if ((lines[i].gpu < 0 || lines[i].gpu == gpu) && strcmp(lines[i].key, key) == 0) return lines[i].value;
    return NULL;
}

static double number(int gpu, const char *key) { const char *said = value(gpu, key); return said ? strtod(said, NULL) : 0; }

static int numbers(int gpu, const char *key, unsigned *into, int room) {
    const char *from = value(gpu, key);
    char *end;
    int count = 0;
    for (; from && count < room; from = end, count++) {
        into[count] = strtoul(from, &end, 0);
        if (end == from) break;
    }
    return count;
}

/* --- the GPUs' physics */
static int64_t monotonic_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static int64_t now_ns(int gpu) { /* of the counters; scripted if `now_s` is */
    return value(gpu, "now_s") ? (int64_t)(number(gpu, "now_s") * 1e9) : monotonic_ns();
}

static uint32_t limit_mw(int gpu) {
    unsigned limits[3] = {0};
    numbers(gpu, "limit_mw", limits, 3);
    return state->gpu[gpu].limit_known ? state->gpu[gpu].limit_mw : limits[2];
}

static double unlimited_w(int gpu, unsigned clock_mhz) { return number(gpu, "idle_w") + number(gpu, "w_per_mhz") * clock_mhz; }

static unsigned clock_mhz(int gpu) { /* the highest that neither the lock nor the power limit forbids */
    unsigned clocks[CLOCKS], best = 0, least = ~0u;
    unsigned most = state->gpu[gpu].locked_max_mhz ? state->gpu[gpu].locked_max_mhz : ~0u;
    for (int i = numbers(gpu, "clocks", clocks, CLOCKS) - 1; i >= 0; i--) {
        if (clocks[i] < least) least = clocks[i];
        if (clocks[i] <= most && clocks[i] > best && unlimited_w(gpu, clocks[i]) * 1000 <= limit_mw(gpu)) best = clocks[i];
    }
    return value(gpu, "clock_mhz") ? (unsigned)number(gpu, "clock_mhz") : best ? best : least == ~0u ? 0 : least;
}

static double power_w(int gpu) { return value(gpu, "power_w") ? number(gpu, "power_w") : unlimited_w(gpu, clock_mhz(gpu)); }

static double energy_mj(int gpu) { /* counts up to now; said in the counter's steps */
    struct gpu_state *mine = &state->gpu[gpu];
    int64_t now = now_ns(gpu), step = (int64_t)(number(gpu, "energy_step_ms") * 1e6);
    if (step > 0) now -= now % step;
    if (mine->energy_at_ns == 0) mine->energy_at_ns = now;
    if (now > mine->energy_at_ns) {
        mine->energy_uj += power_w(gpu) * (now - mine->energy_at_ns) * 1e-3;
        mine->energy_at_ns = now;
    }
    return number(gpu, "energy_mj") + mine->energy_uj * 1e-3;
}

/* --- what every call begins and ends with */
static struct calls *calls_of(const char *function) {
    int i = 0;
    while (i < FUNCTIONS - 1 && state->calls[i].function[0] && strcmp(state->calls[i].function, function)) i++;
    strncpy(state->calls[i].function, function, 63);
    return &state->calls[i];
}

static int scripted(int gpu, const char *function, int *answer) { /* by a line: error FUNCTION|* CODE [FROM [TO]] */
    for (int i = line_count - 1; i >= 0; i--) {
        char name[64];
        unsigned from = 1, to = ~0u;
        int code;
        if (strcmp(lines[i].key, "error") || (lines[i].gpu >= 0 && lines[i].gpu != gpu)) continue;
        if (sscanf(lines[i].value, "%63s %d %u %u", name, &code, &from, &to) < 2) continue;
        if (strcmp(name, function) && (strcmp(name, "*") || gpu < 0)) continue;
        unsigned nth = calls_of(name)->made[gpu < 0 ? GPUS : gpu];
        if (nth >= from && nth <= to) return *answer = code, 1;
    }
    return 0;
}

static double latency_us(int gpu, const char *function) {
    char key[80];
    snprintf(key, sizeof key, "latency_us_%s", function);
    return number(gpu, key);
}

static void sleep_us(double us) {
    struct timespec time = {(time_t)(us / 1e6), (long)(us * 1e3) % 1000000000L};
    if (us > 0) while (nanosleep(&time, &time) != 0) {}
}

typedef void *Device;

static Device handle(int gpu) { return (Device)(((uintptr_t)initialised_in << 8) + gpu + 1); }

static int index_of(Device device) { /* a handle is of the process that got it; -1: no such */
    uintptr_t number = (uintptr_t)device;
    return number >> 8 == (uintptr_t)initialised_in && (number & 255) >= 1 && (number & 255) <= GPUS ? (int)(number & 255) - 1 : -1;
}

/* Begins a call: locks the state and says in `answer` what the script makes of it. True: the function goes on, and ends
 * with `left`. False: it returns `answer` as it is (which is also SUCCESS, with nothing written). */
static int entered(const char *function, int gpu, int *fd, int *answer) {
    if (!state || initialised_in != getpid() || users == 0) return *answer = UNINITIALIZED, 0;
    *fd = locked(STATE);
    read_script();
    if (number(-1, "reloads") != loaded) return *answer = UNINITIALIZED, unlocked(*fd, STATE), 0;
    int column = gpu < 0 ? GPUS : gpu;
    calls_of(function)->made[column]++;
    if (gpu >= 0) calls_of("*")->made[column]++;
    int stopped = scripted(gpu, function, answer);
    double us = latency_us(gpu, function);
    if (us > 0 && strncmp(function, "nvmlDeviceSet", 13) && strncmp(function, "nvmlDeviceReset", 15)) {
        unlocked(*fd, STATE);
        sleep_us(us);
        *fd = locked(STATE);
    }
    if (stopped) unlocked(*fd, STATE);
    return !stopped;
}

static int left(int fd, int answer) { return unlocked(fd, STATE), answer; }

#define ENTER(gpu) int fd, answer; if (!entered(__func__, gpu, &fd, &answer)) return answer
#define ENTER_DEVICE(device) int gpu = index_of(device); if (gpu < 0 && users) return INVALID_ARGUMENT; ENTER(gpu)
#define LEAVE(answer) return left(fd, answer)

static int written(const char *said, char *into, unsigned room) {
    if (!said) return NOT_SUPPORTED;
    if (strlen(said) >= room) return INSUFFICIENT_SIZE;
    return strcpy(into, said), SUCCESS;
}

/* --- NVML */
int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    const char *path = getenv("FAKE_NVML_STATE");
    int file = path ? open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666) : -1, answer;
    if (file < 0) return UNKNOWN;
    if (initialised_in != getpid()) initialised_in = getpid(), users = 0;
    struct stat size;
    int fd = locked(STATE);
    fstat(file, &size);
    if (size.st_size < (off_t)sizeof *state && ftruncate(file, sizeof *state)) {}
    if (!state || mapped.st_ino != size.st_ino || mapped.st_dev != size.st_dev) { /* another file than before */
        state = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        mapped = size, users = 0, seen_version = ~0u;
    }
    close(file);
    read_script();
    calls_of(__func__)->made[GPUS]++;
    if (scripted(-1, __func__, &answer)) LEAVE(answer);
    loaded = number(-1, "reloads");
    for (int gpu = 0; gpu < GPUS; gpu++) energy_mj(gpu); /* begins to count */
    users++;
    LEAVE(SUCCESS);
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void) { ENTER(-1); users--; LEAVE(SUCCESS); }

const char *nvmlErrorString(int code) {
    static char said[32];
    snprintf(said, sizeof said, "stand-in's error %d", code);
    return said;
}

int nvmlSystemGetDriverVersion(char *into, unsigned room) { ENTER(-1); LEAVE(written(value(-1, "driver"), into, room)); }

int nvmlDeviceGetCount_v2(unsigned *count) { ENTER(-1); *count = number(-1, "gpus"); LEAVE(SUCCESS); }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *device) {
    if (users && index >= GPUS) return INVALID_ARGUMENT;
    ENTER((int)index);
    if (index >= number(-1, "gpus")) LEAVE(INVALID_ARGUMENT);
    *device = handle(index);
    LEAVE(SUCCESS);
}

static int by_value(const char *key, const char *wanted, int from_end, Device *device) {
    for (int gpu = 0; gpu < number(-1, "gpus"); gpu++) {
        const char *said = value(gpu, key);
        size_t size = said ? strlen(said) : 0, skip = from_end && strlen(wanted) > size ? strlen(wanted) - size : 0;
        if (said && strcasecmp(said, wanted + skip) == 0) return *device = handle(gpu), SUCCESS;
    }
    return NOT_FOUND;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Device *device) { ENTER(-1); LEAVE(by_value("uuid", uuid, 0, device)); }

int nvmlDeviceGetHandleByPciBusId_v2(const char *pci, Device *device) { /* 8 digits of domain are as good as 4 */
    ENTER(-1);
    LEAVE(by_value("pci", pci, 1, device));
}

int nvmlDeviceGetName(Device device, char *into, unsigned room) {
    ENTER_DEVICE(device);
    LEAVE(written(value(gpu, "name"), into, room));
}

int nvmlDeviceGetUUID(Device device, char *into, unsigned room) {
    ENTER_DEVICE(device);
    LEAVE(written(value(gpu, "uuid"), into, room));
}

int nvmlDeviceGetIndex(Device device, unsigned *index) { ENTER_DEVICE(device); *index = gpu; LEAVE(SUCCESS); }

struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; };

int nvmlDeviceGetPciInfo_v3(Device device, struct pci *pci) {
    ENTER_DEVICE(device);
    if (!value(gpu, "pci")) LEAVE(NOT_SUPPORTED);
    snprintf(pci->legacy, sizeof pci->legacy, "%s", value(gpu, "pci"));
    snprintf(pci->bus_id, sizeof pci->bus_id, "0000%s", value(gpu, "pci"));
    sscanf(pci->bus_id, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device);
    LEAVE(SUCCESS);
}

static int listed(int gpu, const char *key, unsigned *count, unsigned *into) {
    unsigned found[CLOCKS], room = *count;
    *count = numbers(gpu, key, found, CLOCKS);
    if (*count == 0) return SUCCESS;
    if (!into || room < *count) return INSUFFICIENT_SIZE;
    return memcpy(into, found, *count * sizeof *found), SUCCESS;
}

int nvmlDeviceGetSupportedMemoryClocks(Device device, unsigned *count, unsigned *into) {
    ENTER_DEVICE(device);
    LEAVE(listed(gpu, "memory_clocks", count, into));
}

int nvmlDeviceGetSupportedGraphicsClocks(Device device, unsigned memory_mhz, unsigned *count, unsigned *into) {
    ENTER_DEVICE(device);
    unsigned memory[CLOCKS];
    char key[32];
    int known = 0;
    for (int i = numbers(gpu, "memory_clocks", memory, CLOCKS) - 1; i >= 0; i--) known |= memory[i] == memory_mhz;
    snprintf(key, sizeof key, "clocks_at_%u", memory_mhz);
    LEAVE(known ? listed(gpu, value(gpu, key) ? key : "clocks", count, into) : NOT_FOUND);
}

int nvmlDeviceGetClockInfo(Device device, unsigned type, unsigned *mhz) {
    ENTER_DEVICE(device);
    unsigned memory_mhz = state->gpu[gpu].memory_mhz ? state->gpu[gpu].memory_mhz : number(gpu, "memory_mhz");
    *mhz = type == 2 ? memory_mhz : clock_mhz(gpu);
    LEAVE(type <= 1 || memory_mhz ? SUCCESS : NOT_SUPPORTED);
}

int nvmlDeviceGetClock(Device device, unsigned type, unsigned id, unsigned *mhz) {
    ENTER_DEVICE(device);
    *mhz = clock_mhz(gpu);
    LEAVE(type <= 1 && id == 0 ? SUCCESS : NOT_SUPPORTED);
}

int nvmlDeviceGetArchitecture(Device device, unsigned *architecture) {
    ENTER_DEVICE(device);
    *architecture = 9; /* Hopper */
    LEAVE(SUCCESS);
}

int nvmlDeviceGetTotalEnergyConsumption(Device device, unsigned long long *mj) {
    ENTER_DEVICE(device);
    *mj = (unsigned long long)energy_mj(gpu);
    LEAVE(SUCCESS);
}

int nvmlDeviceGetPowerUsage(Device device, unsigned *mw) {
    ENTER_DEVICE(device);
    *mw = (unsigned)(long long)(power_w(gpu) * 1000 + 0.5);
    LEAVE(SUCCESS);
}

struct field {
    uint32_t id, scope;
    int64_t at_us, latency_us;
    uint32_t type, answer;
    union { double real; unsigned integer; unsigned long long wide; } value;
};

static void read_field(int gpu, struct field *field) {
    char key[40];
    snprintf(key, sizeof key, field->scope ? "field_%u_%u" : "field_%u", field->id, field->scope);
    const char *said = value(gpu, key);
    int energy = field->id == 83 || field->id == 191, power = field->id == 185 || field->id == 186;
    field->at_us = now_ns(gpu) / 1000, field->answer = SUCCESS;
    field->type = energy || (field->id >= 74 && field->id <= 79) || (field->id >= 269 && field->id <= 271) ? 3 : 1;
    field->value.wide = 0;
    if (said && strncmp(said, "error ", 6) == 0) field->answer = atoi(said + 6);
    else if (said && strcmp(said, "untouched") == 0) memset(&field->at_us, 0, sizeof *field - 8);
    else if (said) field->value.wide = strtoull(said, NULL, 0);
    else if (field->scope && !(field->scope == 1 && value(gpu, "module"))) field->answer = NOT_SUPPORTED;
    else if (energy) field->value.wide = (unsigned long long)energy_mj(gpu);
    else if (power) field->value.integer = (unsigned)(long long)(power_w(gpu) * 1000 + 0.5);
    else field->answer = NOT_SUPPORTED;
}

int nvmlDeviceGetFieldValues(Device device, int count, struct field *fields) {
    ENTER_DEVICE(device);
    for (int i = 0; i < count; i++) read_field(gpu, &fields[i]);
    LEAVE(SUCCESS);
}

struct process { unsigned pid; unsigned long long bytes; unsigned instance, compute; };

int nvmlDeviceGetComputeRunningProcesses_v3(Device device, unsigned *count, struct process *processes) {
    ENTER_DEVICE(device);
    unsigned pids[64], room = processes ? *count : 0;
    *count = numbers(gpu, "computing", pids, 64);
    for (unsigned i = 0; i < *count && i < room; i++) processes[i] = (struct process){.pid = pids[i]};
    LEAVE(*count > room ? INSUFFICIENT_SIZE : SUCCESS);
}

int nvmlDeviceGetTemperature(Device device, unsigned sensor, unsigned *celsius) {
    ENTER_DEVICE(device);
    *celsius = (unsigned)(int)number(gpu, "temperature_c");
    LEAVE(sensor == 0 ? SUCCESS : INVALID_ARGUMENT);
}

struct temperature { unsigned version, sensor; int celsius; };

int nvmlDeviceGetTemperatureV(Device device, struct temperature *temperature) {
    ENTER_DEVICE(device);
    if (temperature->version != (sizeof *temperature | 1u << 24)) LEAVE(ARGUMENT_VERSION_MISMATCH);
    temperature->celsius = (int)number(gpu, "temperature_c");
    LEAVE(temperature->sensor == 0 ? SUCCESS : INVALID_ARGUMENT);
}

static unsigned long long throttle(int gpu) { /* what the script says, and the power cap where it bites */
    unsigned clocks[CLOCKS], wanted = 0, most = state->gpu[gpu].locked_max_mhz ? state->gpu[gpu].locked_max_mhz : ~0u;
    for (int i = numbers(gpu, "clocks", clocks, CLOCKS) - 1; i >= 0; i--)
        if (clocks[i] <= most && clocks[i] > wanted) wanted = clocks[i];
    return strtoull(value(gpu, "throttle"), NULL, 0) | (clock_mhz(gpu) < wanted ? 4 : 0);
}

int nvmlDeviceGetCurrentClocksEventReasons(Device device, unsigned long long *bits) {
    ENTER_DEVICE(device);
    *bits = throttle(gpu);
    LEAVE(SUCCESS);
}

int nvmlDeviceGetCurrentClocksThrottleReasons(Device device, unsigned long long *bits) {
    ENTER_DEVICE(device);
    *bits = throttle(gpu);
    LEAVE(SUCCESS);
}

int nvmlDeviceGetMigMode(Device device, unsigned *current, unsigned *pending) {
    ENTER_DEVICE(device);
    *current = *pending = number(gpu, "mig");
    LEAVE(SUCCESS);
}

int nvmlDeviceGetPersistenceMode(Device device, unsigned *mode) {
    ENTER_DEVICE(device);
    *mode = number(gpu, "persistence");
    LEAVE(SUCCESS);
}

int nvmlDeviceGetVirtualizationMode(Device device, unsigned *mode) {
    ENTER_DEVICE(device);
    *mode = number(gpu, "virtualization");
    LEAVE(SUCCESS);
}

struct profiles { unsigned version, known[8], requested[8], enforced[8]; };

int nvmlDeviceWorkloadPowerProfileGetCurrentProfiles(Device device, struct profiles *profiles) { /* bits 0-31 only */
    ENTER_DEVICE(device);
    if (profiles->version != (sizeof *profiles | 1u << 24)) LEAVE(ARGUMENT_VERSION_MISMATCH);
    profiles->requested[0] = profiles->enforced[0] = strtoul(value(gpu, "profiles"), NULL, 0);
    LEAVE(SUCCESS);
}

int nvmlDeviceGetPowerManagementLimitConstraints(Device device, unsigned *least, unsigned *most) {
    ENTER_DEVICE(device);
    unsigned limits[3] = {0};
    numbers(gpu, "limit_mw", limits, 3);
    *least = limits[0], *most = limits[1];
    LEAVE(SUCCESS);
}

int nvmlDeviceGetPowerManagementDefaultLimit(Device device, unsigned *mw) {
    ENTER_DEVICE(device);
    unsigned limits[3] = {0};
    numbers(gpu, "limit_mw", limits, 3);
    *mw = limits[2];
    LEAVE(SUCCESS);
}

int nvmlDeviceGetPowerManagementLimit(Device device, unsigned *mw) { ENTER_DEVICE(device); *mw = limit_mw(gpu); LEAVE(SUCCESS); }

int nvmlDeviceGetEnforcedPowerLimit(Device device, unsigned *mw) { ENTER_DEVICE(device); *mw = limit_mw(gpu); LEAVE(SUCCESS); }

/* Settings: one at a time on the whole node, each as long as the script says; the effect comes half-way. */
static int set(const char *function, Device device, uint32_t low, uint32_t high) {
    int gpu = index_of(device), fd, answer = SUCCESS;
    if (gpu < 0 && users) return INVALID_ARGUMENT;
    int64_t begun = monotonic_ns();
    int setting = locked(SETTING), goes_on = entered(function, gpu, &fd, &answer);
    if (goes_on) {
        double us = latency_us(gpu, function);
        unlocked(fd, STATE), sleep_us(us / 2), fd = locked(STATE);
        struct gpu_state *mine = &state->gpu[gpu];
        unsigned limits[3] = {0};
        numbers(gpu, "limit_mw", limits, 3);
        energy_mj(gpu); /* until now, at the old power */
        if (strstr(function, "MemoryLockedClocks")) mine->memory_mhz = high;
        else if (strstr(function, "LockedClocks")) {
            if (low > high) answer = INVALID_ARGUMENT;
            else mine->locked_min_mhz = low, mine->locked_max_mhz = high;
        } else if (low < limits[0] || low > limits[1]) answer = INVALID_ARGUMENT;
        else mine->limit_mw = low, mine->limit_known = 1;
        unlocked(fd, STATE), sleep_us(us / 2);
    }
    if (state) {
        fd = locked(STATE);
        struct set *entry = &state->set[state->sets++ % SETS];
        *entry = (struct set){.gpu = gpu, .code = answer, .pid = getpid(), .low = low, .high = high, .begun_ns = begun,
                              .ended_ns = monotonic_ns()};
        strncpy(entry->function, function, sizeof entry->function - 1);
        unlocked(fd, STATE);
    }
    unlocked(setting, SETTING);
    return answer;
}

int nvmlDeviceSetGpuLockedClocks(Device device, unsigned low, unsigned high) { return set(__func__, device, low, high); }

int nvmlDeviceResetGpuLockedClocks(Device device) { return set(__func__, device, 0, 0); }

int nvmlDeviceSetMemoryLockedClocks(Device device, unsigned low, unsigned high) { return set(__func__, device, low, high); }

int nvmlDeviceResetMemoryLockedClocks(Device device) { return set(__func__, device, 0, 0); }

int nvmlDeviceSetPowerManagementLimit(Device device, unsigned mw) { return set(__func__, device, mw, mw); }
