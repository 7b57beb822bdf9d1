/* Blocks of device memory whose addresses outlive what is behind them.
 *
 * torch's caching allocator calls `allocate_N` and `free_N` with its own lock held. Code that needs Python's
 * lock there can deadlock (another thread may hold that one and wait for the allocator's), so this is C. The
 * driver's functions come from whoever opens a class; nothing is linked.
 *
 * A class is what blocks have in common: one tag and one kind of contents of one saver. While a class is
 * held, somebody copies, maps or unmaps its blocks: none comes then, and one that goes waits until the end.
 */

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#define CLASSES 256
#define FAILED (-1)

enum { SUCCESS = 0 };

typedef struct {
    int (*reserve)(uint64_t *, size_t, size_t, uint64_t, uint64_t);
    int (*free_address)(uint64_t, size_t);
    int (*create)(uint64_t *, size_t, const void *, uint64_t);
    int (*release)(uint64_t);
    int (*map)(uint64_t, size_t, size_t, uint64_t, uint64_t);
    int (*unmap)(uint64_t, size_t);
    int (*set_access)(uint64_t, size_t, const void *, size_t);
    int (*push_context)(void *);
    int (*pop_context)(void **);
    int (*synchronize)(void);
    const void *properties;
    const void *access;
    void *context;
    size_t granularity;
    int device;
} Driver;

typedef struct Block {
    struct Block *next;
    uint64_t serial, address, handle;
    size_t size;
    int class, is_mapped, is_leaving, is_new;
} Block;

typedef struct {
    Driver driver;
    int is_open, is_held, is_asleep;
} Class;

typedef struct {
    uint64_t serial, address, size;
    int32_t class, is_mapped;
} Described;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Class classes[CLASSES];
static Block *blocks;
static uint64_t last_serial;

/* -- one block; the lock is held ------------------------------------------------------------------------ */

static int map_block(const Driver *driver, Block *block) {
    int result = driver->create(&block->handle, block->size, driver->properties, 0);
    if (result != SUCCESS) return result;
    result = driver->map(block->address, block->size, 0, block->handle, 0);
    if (result == SUCCESS) {
        result = driver->set_access(block->address, block->size, driver->access, 1);
        if (result != SUCCESS) driver->unmap(block->address, block->size);
    }
    if (result != SUCCESS) driver->release(block->handle);
    block->is_mapped = result == SUCCESS;
    return result;
}

static int unmap_block(const Driver *driver, Block *block) {
    int result = driver->unmap(block->address, block->size);
    if (result != SUCCESS) return result;
    block->is_mapped = 0;
    return driver->release(block->handle);
}

/* Unlike cudaFree, unmapping waits for nobody who still uses the memory. */
static void wait_for_device(const Driver *driver) {
    void *ours;
    if (driver->push_context(driver->context) != SUCCESS) return;
    driver->synchronize();
    driver->pop_context(&ours);
}

static void drop_block(Block **place) {
    Block *block = *place;
    const Driver *driver = &classes[block->class].driver;
    if (block->is_mapped) {
        wait_for_device(driver);
        unmap_block(driver, block);
    }
    driver->free_address(block->address, block->size);
    *place = block->next;
    free(block);
}

/* -- what torch calls ----------------------------------------------------------------------------------- */

static void *allocate(int class, ptrdiff_t asked, int device) {
    Class *of = &classes[class];
    Block *block = NULL;
    pthread_mutex_lock(&lock);
    if (!of->is_open || of->is_held || of->is_asleep || device != of->driver.device || asked <= 0) goto failed;
    block = calloc(1, sizeof *block);
    if (!block) goto failed;
    block->class = class;
    block->size = ((size_t)asked + of->driver.granularity - 1) / of->driver.granularity * of->driver.granularity;
    if (of->driver.reserve(&block->address, block->size, 0, 0, 0) != SUCCESS) goto failed;
    if (map_block(&of->driver, block) != SUCCESS) {
        of->driver.free_address(block->address, block->size);
        goto failed;
    }
    block->serial = ++last_serial;
    block->next = blocks;
    blocks = block;
    pthread_mutex_unlock(&lock);
    return (void *)(uintptr_t)block->address;
failed:
    free(block);
    pthread_mutex_unlock(&lock);
    return NULL; /* torch raises its out of memory error */
}

static void free_memory(void *address) {
    pthread_mutex_lock(&lock);
    for (Block **place = &blocks; *place; place = &(*place)->next) {
        if ((*place)->address != (uint64_t)(uintptr_t)address || (*place)->is_leaving) continue;
        if (classes[(*place)->class].is_held)
            (*place)->is_leaving = 1;
        else
            drop_block(place);
        break;
    }
    pthread_mutex_unlock(&lock);
}

#define ONE(n)                                                                                    \
    static void *allocate_##n(ptrdiff_t size, int device, void *stream) {                          \
        (void)stream;                                                                              \
        return allocate(0x##n, size, device);                                                      \
    }
#define TEN(n) \
    ONE(n##0) ONE(n##1) ONE(n##2) ONE(n##3) ONE(n##4) ONE(n##5) ONE(n##6) ONE(n##7) \
    ONE(n##8) ONE(n##9) ONE(n##a) ONE(n##b) ONE(n##c) ONE(n##d) ONE(n##e) ONE(n##f)
TEN(0) TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) TEN(6) TEN(7) TEN(8) TEN(9) TEN(a) TEN(b) TEN(c) TEN(d) TEN(e) TEN(f)

typedef void *(*Allocate)(ptrdiff_t, int, void *);

#define NAME(n) allocate_##n,
#define NAMES(n) \
    NAME(n##0) NAME(n##1) NAME(n##2) NAME(n##3) NAME(n##4) NAME(n##5) NAME(n##6) NAME(n##7) \
    NAME(n##8) NAME(n##9) NAME(n##a) NAME(n##b) NAME(n##c) NAME(n##d) NAME(n##e) NAME(n##f)
static const Allocate allocators[CLASSES] = {
    NAMES(0) NAMES(1) NAMES(2) NAMES(3) NAMES(4) NAMES(5) NAMES(6) NAMES(7)
    NAMES(8) NAMES(9) NAMES(a) NAMES(b) NAMES(c) NAMES(d) NAMES(e) NAMES(f)};

void free_block(void *address, ptrdiff_t size, int device, void *stream) {
    (void)size, (void)device, (void)stream;
    free_memory(address);
}

/* -- what the saver calls ------------------------------------------------------------------------------- */

static int is_among(int class, const int *chosen, int count) {
    for (int i = 0; i < count; i++)
        if (chosen[i] == class) return 1;
    return 0;
}

/* The number of a new class, or FAILED. One that was closed is used again when its last block has gone. */
int open_class(const Driver *driver) {
    int found = FAILED;
    pthread_mutex_lock(&lock);
    for (int class = 0; class < CLASSES && found == FAILED; class++) {
        int is_free = !classes[class].is_open;
        for (Block *block = blocks; block && is_free; block = block->next) is_free = block->class != class;
        if (is_free) found = class;
    }
    if (found != FAILED) classes[found] = (Class){*driver, 1, 0, 0};
    pthread_mutex_unlock(&lock);
    return found;
}

void *allocator_of(int class) { return (void *)allocators[class]; }

/* No more blocks for it; those it has go when torch frees them. */
void close_class(int class) {
    pthread_mutex_lock(&lock);
    classes[class].is_open = 0;
    pthread_mutex_unlock(&lock);
}

/* SUCCESS, or FAILED if somebody holds one of them. */
int hold_classes(const int *chosen, int count) {
    int result = SUCCESS;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < count; i++)
        if (classes[chosen[i]].is_held) result = FAILED;
    for (int i = 0; i < count && result == SUCCESS; i++) classes[chosen[i]].is_held = 1;
    pthread_mutex_unlock(&lock);
    return result;
}

void let_go_of_classes(const int *chosen, int count) {
    pthread_mutex_lock(&lock);
    for (Block **place = &blocks; *place;) {
        if (is_among((*place)->class, chosen, count) && (*place)->is_leaving)
            drop_block(place);
        else
            place = &(*place)->next;
    }
    for (int i = 0; i < count; i++) classes[chosen[i]].is_held = 0;
    pthread_mutex_unlock(&lock);
}

/* As many blocks of these classes as there are; at most `most` are described. */
int describe_blocks(const int *chosen, int count, Described *out, int most) {
    int found = 0;
    pthread_mutex_lock(&lock);
    for (Block *block = blocks; block; block = block->next) {
        if (!is_among(block->class, chosen, count) || block->is_leaving) continue;
        if (found < most)
            out[found] = (Described){block->serial, block->address, block->size, block->class, block->is_mapped};
        found++;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

/* Give back what is behind all blocks of held classes. Goes on after an error and returns the first one. */
int unmap_blocks(const int *chosen, int count) {
    int result = SUCCESS;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < count; i++) classes[chosen[i]].is_asleep = 1;
    for (Block *block = blocks; block; block = block->next) {
        if (!is_among(block->class, chosen, count) || !block->is_mapped) continue;
        int one = unmap_block(&classes[block->class].driver, block);
        if (result == SUCCESS) result = one;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

/* New memory behind all blocks of held classes that have none, or behind none of these. */
int map_blocks(const int *chosen, int count) {
    int result = SUCCESS;
    pthread_mutex_lock(&lock);
    for (Block *block = blocks; block && result == SUCCESS; block = block->next) {
        if (!is_among(block->class, chosen, count) || block->is_mapped || block->is_leaving) continue;
        result = map_block(&classes[block->class].driver, block);
        block->is_new = result == SUCCESS;
    }
    for (Block *block = blocks; block; block = block->next) {
        if (block->is_new && result != SUCCESS) unmap_block(&classes[block->class].driver, block);
        block->is_new = 0;
    }
    for (int i = 0; i < count && result == SUCCESS; i++) classes[chosen[i]].is_asleep = 0;
    pthread_mutex_unlock(&lock);
    return result;
}
