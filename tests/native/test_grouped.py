"""Products of matrices in groups on other processors than this one, by cross compiler and emulator."""

import shutil
import subprocess
from pathlib import Path

import pytest
from machine import needs_compiler

from lmlong.native.build import find_compiler
from lmlong.native.source import SHARED_HEADERS

PROGRAM = """
#include "grouped.h"
#include <cstdio>

template <typename Format>
void print_products() {
    constexpr Int outputs = 40, inputs = 70, vectors = 7, groups = 3, panels = 3;
    static uint8_t matrix[panels * groups * Format::BYTES];
    static float x[vectors * inputs], y[vectors * outputs];
    static Activations rounded[vectors * groups];
    uint32_t random = 1;
    auto draw = [&] { return (random = random * 1664525 + 1013904223) >> 16; };
    for (uint8_t& byte : matrix)
        do byte = draw();
        while (byte == 0x80);  // -128 is no code of int8
    for (Int record = 0; record < panels * groups; record++) {
        auto* scales = reinterpret_cast<uint16_t*>(matrix + record * Format::BYTES);
        for (Int i = 0; i < Format::CODES / 2; i++) scales[i] = i ? (scales[i] & 0x87ff) | 0x2800 : draw() & 0x83ff;
    }
    for (float& number : x) number = (int32_t(draw()) - 32768) / 1000.0f;
    for (Int v = 0; v < vectors; v++) round_activations(x + v * inputs, inputs, rounded + v * groups);
    multiply_groups<Format>(matrix, {0, 10}, groups, rounded, vectors, y, outputs);
    multiply_groups<Format>(matrix, {10, outputs}, groups, rounded, vectors, y, outputs);
    for (float& number : y) {
        uint32_t bits;
        std::memcpy(&bits, &number, sizeof bits);
        std::printf("%08x\\n", bits);
    }
}

int main() {
    print_products<Int4Groups>();
    print_products<Int8Groups>();
}
"""
FLAGS = ("-std=c++17", "-O2", f"-I{SHARED_HEADERS}")


def compile_program(folder: Path, compiler: str, *flags: str) -> Path:
    source, program = folder / "program.cpp", folder / "program"
    source.write_text(PROGRAM)
    subprocess.run([compiler, *FLAGS, *flags, str(source), "-o", str(program)], check=True)
    return program


def output(*command: str) -> list[str]:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


@pytest.mark.slow
@needs_compiler
@pytest.mark.skipif(not shutil.which("aarch64-linux-gnu-g++"), reason="needs a cross compiler")
@pytest.mark.skipif(not shutil.which("qemu-aarch64"), reason="needs an emulator")
@pytest.mark.parametrize("march", ["armv8-a", "armv8.2-a+dotprod"])
def test_neon_computes_the_same_bits(tmp_path: Path, march: str) -> None:
    compiler = find_compiler()
    assert compiler is not None
    expected = output(str(compile_program(tmp_path, compiler, "-march=native")))
    assert len(set(expected)) > 500
    emulated = compile_program(tmp_path, "aarch64-linux-gnu-g++", f"-march={march}", "-static")
    assert output("qemu-aarch64", "-cpu", "max", str(emulated)) == expected
