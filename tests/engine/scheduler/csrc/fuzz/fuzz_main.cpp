// A driver for compilers without libFuzzer: fuzz CORPUS SECONDS SEED [--grow].
//
// Runs every file of the corpus, then mutations of them for so many seconds. The control plane is compiled with
// -fsanitize-coverage=trace-pc: an input that reaches an edge which none reached before is kept, with --grow in the folder too. The
// input at hand lies in the file "crash" of the working folder when the program does not end well.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <string_view>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

constexpr std::size_t kEdges = 1 << 16;
std::uint8_t reached[kEdges];       // by the input at hand
std::uint8_t ever_reached[kEdges];  // by any

using Input = std::vector<std::uint8_t>;

bool run(const Input& input) {
  std::fill(std::begin(reached), std::end(reached), std::uint8_t{0});
  {
    std::ofstream file("crash", std::ios::binary);
    file.write(reinterpret_cast<const char*>(input.data()), static_cast<std::streamsize>(input.size()));
  }
  LLVMFuzzerTestOneInput(input.data(), input.size());
  bool is_new = false;
  for (std::size_t i = 0; i < kEdges; ++i) {
    is_new = is_new || (reached[i] != 0 && ever_reached[i] == 0);
    ever_reached[i] |= reached[i];
  }
  return is_new;
}

Input mutate(const std::vector<Input>& corpus, std::mt19937_64& random) {
  const auto below = [&](std::size_t n) { return static_cast<std::size_t>(random() % n); };
  Input input = corpus.empty() || below(20) == 0 ? Input(20 + below(600)) : corpus[below(corpus.size())];
  if (corpus.empty() || below(20) == 0) {
    for (auto& byte : input) byte = static_cast<std::uint8_t>(random());
  }
  for (std::size_t count = 1 + below(8); count > 0; --count) {
    const std::size_t at = input.empty() ? 0 : below(input.size());
    switch (below(5)) {
      case 0:
        if (!input.empty()) input[at] = static_cast<std::uint8_t>(random());
        break;
      case 1:
        input.insert(input.begin() + static_cast<std::ptrdiff_t>(at), static_cast<std::uint8_t>(random()));
        break;
      case 2:
        if (!input.empty()) input.erase(input.begin() + static_cast<std::ptrdiff_t>(at));
        break;
      case 3:  // a piece of another
        if (!corpus.empty()) {
          const Input& other = corpus[below(corpus.size())];
          const std::size_t from = other.empty() ? 0 : below(other.size());
          const std::size_t length = std::min(other.size() - from, 1 + below(60));
          input.insert(input.begin() + static_cast<std::ptrdiff_t>(at), other.begin() + static_cast<std::ptrdiff_t>(from),
                       other.begin() + static_cast<std::ptrdiff_t>(from + length));
        }
        break;
      case 4:  // a piece again
        if (!input.empty()) {
          const std::size_t length = std::min(input.size() - at, 1 + below(40));
          const Input piece(input.begin() + static_cast<std::ptrdiff_t>(at), input.begin() + static_cast<std::ptrdiff_t>(at + length));
          input.insert(input.begin() + static_cast<std::ptrdiff_t>(at), piece.begin(), piece.end());
        }
        break;
    }
  }
  if (input.size() > 3000) input.resize(3000);
  return input;
}

}  // namespace

extern "C" void __sanitizer_cov_trace_pc() {
  const auto pc = reinterpret_cast<std::uintptr_t>(__builtin_return_address(0));
  reached[(pc * 0x9E3779B97F4A7C15u >> 40) % kEdges] = 1;
}

int main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "usage: fuzz CORPUS SECONDS SEED [--grow]\n");
    return 2;
  }
  const std::filesystem::path folder = argv[1];
  const double seconds = std::atof(argv[2]);
  std::mt19937_64 random(static_cast<std::uint64_t>(std::atoll(argv[3])));
  const bool grows = argc > 4 && std::string_view(argv[4]) == "--grow";
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  std::vector<Input> corpus;
  for (const auto& path : files) {
    std::ifstream file(path, std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    run(corpus.back());
  }
  const std::size_t num_files = corpus.size();
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  long long num_runs = 0;
  for (; std::chrono::steady_clock::now() < end; ++num_runs) {
    Input input = mutate(corpus, random);
    if (!run(input)) continue;
    if (grows) {
      std::ofstream file(folder / ("seed" + std::string(argv[3]) + "_" + std::to_string(num_runs)), std::ios::binary);
      file.write(reinterpret_cast<const char*>(input.data()), static_cast<std::streamsize>(input.size()));
    }
    corpus.push_back(std::move(input));
  }
  std::size_t num_edges = 0;
  for (const auto edge : ever_reached) num_edges += edge;
  std::printf("corpus %zu, new %zu, runs %lld, edges %zu\n", num_files, corpus.size() - num_files, num_runs, num_edges);
  std::filesystem::remove("crash");
  return 0;
}
