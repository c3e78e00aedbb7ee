// Link with the first versions of functions that later C libraries define anew, so that older systems can load a library.

#if defined(__x86_64__)
#define FIRST_VERSION "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define FIRST_VERSION "GLIBC_2.17"
#endif

__asm__(".symver exp, exp@" FIRST_VERSION);
__asm__(".symver log, log@" FIRST_VERSION);
__asm__(".symver pow, pow@" FIRST_VERSION);
