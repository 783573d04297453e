// From the chunks of a step to what the kernels read: tokens, cells of the pool, pieces of attention. A step is checked
// here, entry by entry, before anything of it is run.
#pragma once

#include <vector>

#include "abi.h"
#include "kernels.h"

namespace tide {

class Plan {
public:
    explicit Plan(const tm_shape &shape);

    // `threads` that the pieces of attention are shared out to.
    tm_result make(const tm_step &step, int threads);

    View view{};
    std::vector<Piece> pieces;
    std::vector<int32_t> sampled_pieces;  // of them, those of tokens that sample
    int64_t num_slots = 0;

private:
    tm_result check(const tm_step &step) const;
    void place_tokens(const tm_step &step);
    void find_sampled();
    void cut_tiles(int32_t index);
    void cut_decodes(int32_t index, int64_t wanted);

    const tm_shape &shape_;
    std::vector<Chunk> chunks_;
    std::vector<int64_t> ids_, positions_, k_cells_, v_cells_, sampled_, slot_, parts_;
    std::vector<uint8_t> is_long_;
    std::vector<float> partial_;
};

}  // namespace tide
