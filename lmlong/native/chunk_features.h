// The features of a chunk of queries or keys.

#pragma once

#include "feature_maps.h"
#include "scan_job.h"

namespace {

// Map the rows of queries or keys to their features, in place. If `derivative` is not null, fill it with the feature
// map's derivative
void apply_feature_map(FeatureMap feature_map, Int tokens, Int width, float* rows, float* derivative = nullptr) {
    if (feature_map == IDENTITY) return;
    for (Int t = 0; t < TILE; t++, rows += padded(width), derivative += derivative ? padded(width) : 0) {
        for (Int i = 0; i < padded(width); i += LANES) {
            const FloatVec x = lanes(rows + i);
            FloatVec dx;
            lanes(rows + i) = feature_map == ELU    ? elu_plus_one(x, dx)
                              : feature_map == RELU ? relu(x, dx)
                                                    : silu(x, dx);
            if (derivative) lanes(derivative + i) = dx;
        }
        std::fill(rows + (t < tokens ? width : 0), rows + padded(width), 0.0f);
    }
}

}  // namespace
