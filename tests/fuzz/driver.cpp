// Runs a fuzz target without libFuzzer, for compilers that do not have it: replays the files of folders, then mutates
// them for some seconds. Without coverage it keeps no new inputs; one seed gives the same inputs in the same order.
//
//   driver SECONDS SEED FOLDER...
//
// What is about to run lies in the file that FUZZ_INPUT names, so that it is still there after a crash.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

using Input = std::vector<unsigned char>;

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size);
extern "C" std::size_t LLVMFuzzerCustomMutator(unsigned char* data, std::size_t size, std::size_t most, unsigned seed);

namespace {

constexpr std::size_t kInputBytesMax = 4096;

std::mt19937_64& generator() {
    static std::mt19937_64 shared;
    return shared;
}

std::vector<Input> read_folders(int count, char** folders) {
    std::vector<std::filesystem::path> paths;
    for (int i = 0; i < count; ++i)
        for (const auto& entry : std::filesystem::directory_iterator(folders[i]))
            if (entry.is_regular_file()) paths.push_back(entry.path());
    std::sort(paths.begin(), paths.end());
    std::vector<Input> inputs;
    for (const auto& path : paths) {
        std::ifstream file(path, std::ios::binary);
        inputs.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    }
    return inputs;
}

void run(const Input& input) {
    if (const char* path = std::getenv("FUZZ_INPUT"))
        std::ofstream(path, std::ios::binary)
            .write(reinterpret_cast<const char*>(input.data()), static_cast<std::streamsize>(input.size()));
    // Memory of the input's own size, so that a sanitizer sees a read past its end.
    Input exact(input);
    exact.shrink_to_fit();
    LLVMFuzzerTestOneInput(exact.data(), exact.size());
}

}  // namespace

// Mutations of any bytes: the part of libFuzzer that a custom mutator calls.
extern "C" std::size_t LLVMFuzzerMutate(unsigned char* data, std::size_t size, std::size_t most) {
    std::mt19937_64& random = generator();
    for (std::uint64_t times = 1 + random() % 4; times--;) {
        std::size_t at = size ? random() % size : 0;
        switch (random() % 5) {
            case 0:
                if (size < most) {
                    std::memmove(data + at + 1, data + at, size - at);
                    data[at] = static_cast<unsigned char>(random());
                    ++size;
                }
                break;
            case 1:
                if (size > 1) {
                    std::size_t count = 1 + random() % std::min<std::size_t>(8, size - at);
                    std::memmove(data + at, data + at + count, size - at - count);
                    size -= count;
                }
                break;
            case 2:
                if (size) data[at] = static_cast<unsigned char>(random());
                break;
            case 3:
                if (size)
                    std::memset(data + at, static_cast<int>(random() % 2 * 255), std::min<std::size_t>(4, size - at));
                break;
            default:
                if (size) data[at] = static_cast<unsigned char>(data[at] ^ 1u << random() % 8);
        }
    }
    return size;
}

int main(int argc, char** argv) {
    if (argc < 4) {
        std::fprintf(stderr, "usage: driver SECONDS SEED FOLDER...\n");
        return 2;
    }
    std::vector<Input> corpus = read_folders(argc - 3, argv + 3);
    for (const Input& input : corpus) run(input);
    unsigned long executions = corpus.size();
    auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(std::atof(argv[1]));
    generator().seed(std::strtoull(argv[2], nullptr, 10));
    while (!corpus.empty() && std::chrono::steady_clock::now() < end) {
        Input input = corpus[generator()() % corpus.size()];
        std::size_t size = std::min(input.size(), kInputBytesMax);
        input.resize(kInputBytesMax);
        for (std::uint64_t times = 1 + generator()() % 3; times--;)
            size = LLVMFuzzerCustomMutator(input.data(), size, kInputBytesMax, static_cast<unsigned>(generator()()));
        input.resize(size);
        run(input);
        ++executions;
    }
    std::printf("executions: %lu\n", executions);
    return 0;
}
