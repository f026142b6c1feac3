// Ranks on MPI, with messages from any thread. A message is split into chunks of at most CHUNK_BYTES, because MPI
// counts are int.
#include <mpi.h>
#include <omp.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "device/check.h"
#include "parallel/launch.h"
#include "parallel/ranks.h"
#include "parallel/watch.h"

#define MPI_CHECK(call)                                                                                                \
    do {                                                                                                               \
        int error_ = (call);                                                                                           \
        if (error_ != MPI_SUCCESS) mpi_failed(error_, #call, __FILE__, __LINE__);                                      \
    } while (0)

// Ends the run with MPI's reason and the place of the call.
NORETURN static void mpi_failed(int error, const char* call, const char* file, int line) {
    char why[MPI_MAX_ERROR_STRING] = "";
    int length;
    MPI_Error_string(error, why, &length);
    die(EXIT_FAILED, "%s:%d: %s: %s; if another rank failed before, its message says more", file, line, call, why);
}

static const size_t CHUNK_BYTES = (size_t)16 << 20;

// A group of ranks. Collectives of one group come from one thread at a time; different groups may overlap.
struct Ranks {
    MPI_Comm comm;  // MPI_COMM_NULL: one rank, without MPI
    int count, index;
    MPI_Request posted;  // of the note in flight
    char note[RANKS_NOTE];
};

static int local, here = 1;  // ranks_local, ranks_here

// Bytes of the chunk that begins at `at`; 0 after the end of the message.
static int chunk_bytes(size_t bytes, size_t at) {
    return at < bytes ? (int)(bytes - at < CHUNK_BYTES ? bytes - at : CHUNK_BYTES) : 0;
}

// MPI_COMM_NULL: a group of one rank.
static Ranks* group_create(MPI_Comm comm) {
    Ranks* group = (Ranks*)host_alloc(sizeof(Ranks));
    group->comm = comm;
    group->count = 1;
    group->posted = MPI_REQUEST_NULL;
    if (comm != MPI_COMM_NULL) {
        MPI_CHECK(MPI_Comm_size(comm, &group->count));
        MPI_CHECK(MPI_Comm_rank(comm, &group->index));
    }
    return group;
}

// die() calls this to end a run of several ranks.
static void end_all(int code) { MPI_Abort(MPI_COMM_WORLD, code); }

// Whether mpirun, or srun on a cluster, started this process. A single process needs no MPI: MPI_Init would take 0.3 s
// and leave a folder in /tmp.
static int launched(void) { return launch_count() > 0 || getenv("PMIX_RANK") || getenv("PMI_RANK"); }

// The ranks of a host share its processors, unless each is bound to some already. With more threads than processors
// they would wait for one another. mpirun binds up to two ranks to a core each. Its own process, the parent of this
// one, has all the processors that it was given.
static void share_processors(bool by_mpirun) {
    int share = (int)sysconf(_SC_NPROCESSORS_ONLN) / here, bound = omp_get_num_procs();
    int threads = share < bound ? share : bound;
    if (!getenv("OMP_NUM_THREADS")) omp_set_num_threads(threads > 1 ? threads : 1);

    cpu_set_t given;
    if (!by_mpirun || sched_getaffinity(getppid(), sizeof(given), &given) != 0) return;
    const int wanted = getenv("OMP_NUM_THREADS") ? omp_get_max_threads() : CPU_COUNT(&given) / here;
    if (2 * bound <= wanted && 2 * bound <= CPU_COUNT(&given))
        warn(
            "mpirun has bound this rank to %d of %d processors, which %d rank%s could share: start it with mpirun "
            "--bind-to none",
            bound, CPU_COUNT(&given), here, here == 1 ? "" : "s");
}

Ranks* ranks_start(int* argc, char*** argv) {
    if (!launched()) return group_create(MPI_COMM_NULL);
    const int expected = launch_count(), task = launch_index();  // MPI_Init changes the environment
    const bool by_mpirun = getenv("OMPI_COMM_WORLD_SIZE") != NULL;
    // MPI, usable from all threads.
    int threads;
    MPI_CHECK(MPI_Init_thread(argc, argv, MPI_THREAD_MULTIPLE, &threads));
    MPI_CHECK(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN));  // groups made from it take it over

    // From here on MPI's errors end in die(), and their messages name the rank.
    Ranks* world = group_create(MPI_COMM_WORLD);
    if (world->count > 1) {
        char host[64] = "", who[128];
        gethostname(host, sizeof(host) - 1);
        snprintf(who, sizeof(who), "rank %d of %d (%s): ", world->index, world->count, host);
        die_as_rank(world->index, who, end_all);
    }
    // Each process would be a run of its own, and all would be the same run.
    if (world->count == 1 && expected > 1)
        die(EXIT_USAGE,
            "started as task %d of %d, but MPI finds no other task: the launcher and this Open MPI do not know each "
            "other. With Slurm: srun --mpi pmix (srun --mpi list), or mpirun in the job. Tasks that are runs of their "
            "own: env -u SLURM_STEP_NUM_TASKS",
            task, expected);
    if (threads < MPI_THREAD_MULTIPLE)
        die(EXIT_FAILED,
            "this MPI was built without MPI_THREAD_MULTIPLE, which threads that save and watch need; use "
            "an Open MPI that has it");

    // Only rank 0 prints. The ranks of this host share its processors.
    if (world->index != 0 && !freopen("/dev/null", "w", stdout)) die(EXIT_FAILED, "cannot open /dev/null");
    MPI_Comm host_comm;
    MPI_CHECK(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host_comm));
    MPI_CHECK(MPI_Comm_rank(host_comm, &local));
    MPI_CHECK(MPI_Comm_size(host_comm, &here));
    MPI_CHECK(MPI_Comm_free(&host_comm));
    share_processors(by_mpirun);
    return world;
}

void ranks_end(Ranks* world) {
    if (world->comm != MPI_COMM_NULL) {
        ranks_barrier(world);
        die_as_rank(0, "", NULL);
        MPI_CHECK(MPI_Finalize());
    }
    free(world);
}

int ranks_count(const Ranks* group) { return group->count; }
int ranks_index(const Ranks* group) { return group->index; }
int ranks_local(void) { return local; }
int ranks_here(void) { return here; }

Ranks* ranks_split(Ranks* group, int color) {
    MPI_Comm comm = MPI_COMM_NULL;
    if (group->comm != MPI_COMM_NULL) {
        watch_begin("split");
        MPI_CHECK(MPI_Comm_split(group->comm, color, group->index, &comm));
        watch_end();
    }
    return group_create(comm);
}

void ranks_free(Ranks* group) {
    if (group->comm != MPI_COMM_NULL) {
        MPI_CHECK(MPI_Wait(&group->posted, MPI_STATUS_IGNORE));
        MPI_CHECK(MPI_Comm_free(&group->comm));
    }
    free(group);
}

void ranks_broadcast(Ranks* group, void* data, size_t bytes, int root) {
    if (group->count == 1) return;
    watch_begin("broadcast");
    for (size_t at = 0; at < bytes; at += CHUNK_BYTES)
        MPI_CHECK(MPI_Bcast((char*)data + at, chunk_bytes(bytes, at), MPI_BYTE, root, group->comm));
    watch_end();
}

void ranks_all_gather(Ranks* group, void* all, const void* mine, size_t bytes) {
    char* own = (char*)all + (size_t)group->index * bytes;
    if (bytes && own != mine) memcpy(own, mine, bytes);
    if (group->count == 1) return;
    watch_begin("all-gather");
    for (int i = 0; i < group->count; i++) ranks_broadcast(group, (char*)all + (size_t)i * bytes, bytes, i);
    watch_end();
}

void ranks_send_receive(Ranks* group, int to, const void* send, size_t send_bytes, int from, void* recv,
                        size_t recv_bytes) {
    // A rank keeps its own part by a copy. It may overlap where send and recv are one buffer.
    if (to == group->index) {
        ASSERT(from == to && send_bytes == recv_bytes);
        if (send_bytes) memmove(recv, send, send_bytes);
        return;
    }

    // Chunk by chunk. The two messages may differ in length: the shorter one has no partner (MPI_PROC_NULL) after its
    // end.
    watch_begin("exchange");
    for (size_t at = 0; at < max_size(send_bytes, recv_bytes); at += CHUNK_BYTES) {
        const int out = chunk_bytes(send_bytes, at), in = chunk_bytes(recv_bytes, at);
        MPI_CHECK(MPI_Sendrecv((const char*)send + at, out, MPI_BYTE, out ? to : MPI_PROC_NULL, 0, (char*)recv + at, in,
                               MPI_BYTE, in ? from : MPI_PROC_NULL, 0, group->comm, MPI_STATUS_IGNORE));
    }
    watch_end();
}

void ranks_barrier(Ranks* group) {
    if (group->count == 1) return;
    watch_begin("barrier");
    MPI_CHECK(MPI_Barrier(group->comm));
    watch_end();
}

// The note is copied: it must not change while it is in flight.
int ranks_post(Ranks* group, const void* note, size_t bytes) {
    int sent;
    ASSERT(bytes <= RANKS_NOTE);
    // A note is dropped while the one before is in flight: the next will be newer anyway.
    MPI_CHECK(MPI_Test(&group->posted, &sent, MPI_STATUS_IGNORE));
    if (!sent) return 0;
    memcpy(group->note, note, bytes);
    MPI_CHECK(MPI_Isend(group->note, (int)bytes, MPI_BYTE, 0, 0, group->comm, &group->posted));
    return 1;
}

int ranks_poll(Ranks* group, void* note, size_t bytes) {
    int there;
    MPI_Status status;
    MPI_CHECK(MPI_Iprobe(MPI_ANY_SOURCE, 0, group->comm, &there, &status));
    if (!there) return -1;
    MPI_CHECK(MPI_Recv(note, (int)bytes, MPI_BYTE, status.MPI_SOURCE, 0, group->comm, MPI_STATUS_IGNORE));
    return status.MPI_SOURCE;
}
