# A GPU environment on verl's published image for SGLang 0.5.12 (quoted from verl's docker/README.md), which brings
# CUDA 13, torch 2.11 and SGLang with its kernels. Not built here.
# docs/gpu.md has the commands that build and start it.
FROM verlai/verl:sgl0512.latest

WORKDIR /workspace
COPY constraints-gpu.txt .
RUN apt-get update && apt-get install --yes libnuma1
# Everything else in the versions of the lock file. What is built for CUDA stays as the image has it. pip cannot remove what
# Debian installed, so --ignore-installed puts ours before it on the path. Of pip's own packages it would leave two versions.
RUN grep -vE '^(#|torch|triton|nvidia-|cuda-|cupy-|flash|sgl)' constraints-gpu.txt > rest.txt \
    && pip list --path /usr/lib/python3/dist-packages --format freeze | sed 'y/_/-/; s/^/^/; s/==.*/==/' > debian.txt \
    && (grep -if debian.txt rest.txt > over.txt || true) \
    && pip install --no-cache-dir --no-deps --ignore-installed --requirement over.txt \
    && pip install --no-cache-dir --no-deps --requirement rest.txt

WORKDIR /workspace/medserl
COPY . .
RUN pip install --no-cache-dir --no-deps . && medserl --help > /dev/null

CMD ["bash"]
