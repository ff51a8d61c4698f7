-- The model of a core: instructions decoded by hand, cycles by hand, what one call runs.
local here = arg and arg[0]:match ".*/" or "tests/modules/estimate/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local estimate = require "tycho.estimate"
local decode = require("tycho.estimate.trace").decode

local cycles = estimate.pipeline.cycles

local function decoded(text, want)
  local i = decode(text)
  check.equal({ i.kind, i.load, i.store, table.concat(i.reads, " "), table.concat(i.writes, " ") }, want, text)
end

check.test("instructions are what the manual says", function()
  decoded("vaddps zmm0,zmm1,ZMMWORD PTR [rdi+rax*4]", { "add 512", "load 512", nil, "rdi rax v1", "v0" })
  decoded("vfmadd231ps ymm3,ymm1,ymm2", { "fma 256", nil, nil, "v3 v1 v2", "v3" })
  decoded("vmulss xmm3,xmm3,DWORD PTR [rip+0x10]        # 1234 <name>",
    { "multiply 128", "load 128", nil, "v3", "v3" })
  decoded("vmovups ZMMWORD PTR [rdx+0x40],zmm5", { nil, nil, "store 512", "rdx v5", "" })
  decoded("vmovups zmm5,ZMMWORD PTR [rdx+r8*1]", { nil, "load 512", nil, "rdx r8", "v5" })
  decoded("vbroadcastss zmm1,DWORD PTR [rax]", { nil, "broadcast 512", nil, "rax", "v1" })
  decoded("vbroadcastss zmm1,xmm2", { "cross 512", nil, nil, "v2", "v1" })
  decoded("vcmpltps k1,zmm2,zmm3", { "compare 512", nil, nil, "v2 v3", "k1" })
  decoded("vmovaps zmm0{k1},zmm4", { nil, nil, nil, "k1 v0 v4", "v0" })
  decoded("vblendmps zmm0{k1},zmm4,zmm5", { "blend 512", nil, nil, "k1 v0 v4 v5", "v0" })
  decoded("vmulps zmm0{k2}{z},zmm4,zmm5", { "multiply 512", nil, nil, "k2 v4 v5", "v0" })
  decoded("vpxor xmm0,xmm0,xmm0", { nil, nil, nil, "", "v0" })
  decoded("vgatherdps zmm1{k1},ZMMWORD PTR [rdi+zmm0*4]", { "gather 512", nil, nil, "k1 rdi v0 v1", "v1" })
  decoded("vdivpd ymm1,ymm2,ymm3", { "divide f64 256", nil, nil, "v2 v3", "v1" })
  decoded("addps xmm0,XMMWORD PTR [rsi]", { "add 128", "load 128", nil, "rsi v0", "v0" })
  decoded("movups XMMWORD PTR [rdi],xmm1", { nil, nil, "store 128", "rdi v1", "" })
  decoded("sqrtps xmm1,xmm2", { "root 128", nil, nil, "v2", "v1" })
  decoded("ucomiss xmm0,xmm1", { "compare 128", nil, nil, "v0 v1", "flags" })
  decoded("add rax,0x40", { "alu", nil, nil, "rax", "rax flags" })
  decoded("cmp rax,rcx", { "alu", nil, nil, "rax rcx", "flags" })
  decoded("jne 1234 <name+0x10>", { "branch", nil, nil, "flags", "" })
  decoded("lea r8,[rdi+rcx*8+0x10]", { "alu", nil, nil, "rdi rcx", "r8" })
  decoded("mov eax,DWORD PTR [rsi]", { nil, "load scalar", nil, "rsi", "rax" })
  decoded("mov QWORD PTR [rdi+r9*1],r10", { nil, nil, "store scalar", "rdi r9 r10", "" })
  decoded("xor eax,eax", { nil, nil, nil, "", "rax" })
  decoded("imul r9,r8", { "multiply integer", nil, nil, "r9 r8", "r9 flags" })
end)

-- A core with round numbers.
local costs = { front = 0.25, width = 512, ghz = 1, kinds = { alu = { latency = 1, rate = 0.25 },
  ["add 512"] = { latency = 3, rate = 1 }, ["multiply 512"] = { latency = 4, rate = 1 },
  ["fma 512"] = { latency = 4, rate = 1 }, ["load 512"] = { rate = 0.5 } },
  shares = { ["fma 512"] = { ["multiply 512"] = 1 }, ["multiply 512"] = { ["fma 512"] = 1 } } }

local function many(n, ...)
  local texts, list = { ... }, {}
  for i = 0, n - 1 do
    for _, text in ipairs(texts) do list[#list + 1] = decode((text:gsub("%%d", i % 8))) end
  end
  return list
end

check.test("cycles are those of chains, of a kind's rate, of what shares it, of the front, of the window", function()
  local function about(list, want, options)
    local got = cycles(list, costs, options)
    check.ok(math.abs(got - want) <= 6, ("%.2f cycles, wanted about %g"):format(got, want))
  end
  about(many(100, "vaddps zmm0,zmm0,zmm1"), 300)                              -- a chain: 3 each
  about(many(100, "vaddps zmm%d,zmm15,zmm14"), 100)                           -- one each cycle
  about(many(100, "vfmadd231ps zmm%d,zmm15,zmm14"), 100)                      -- eight chains of 4 keep one busy
  about(many(100, "vaddps zmm%d,zmm15,zmm14", "vmulps zmm%d,zmm15,zmm14"), 100) -- of two kinds each has its turn
  about(many(100, "vfmadd231ps zmm0,zmm15,zmm14", "vmulps zmm1,zmm15,zmm14"), 400) -- the chain is longer
  about(many(100, "vmulps zmm%d,zmm15,zmm14", "vmulps zmm%d,zmm14,zmm15"), 200)
  local two = many(100, "vfmadd231ps zmm%d,zmm15,zmm14", "vmulps zmm9,zmm15,zmm14")
  about(two, 200)                                                             -- these wait for each other
  about(many(400, "mov rax,rcx"), 100)                                        -- four enter in a cycle
  about(many(100, "vaddps zmm%d,zmm15,ZMMWORD PTR [rdi]"), 105)               -- loads are behind
  -- A chain of adds between other work: with a small window nothing overlaps.
  local chains = many(20, "vdivps zmm0,zmm14,zmm15", "vaddps zmm1,zmm0,zmm15", "vaddps zmm2,zmm1,zmm15")
  costs.kinds["divide 512"] = { latency = 10, rate = 1 }
  about(chains, 40)
  about(chains, 20 * 16, { window = 1 })
  check.equal(cycles({}, costs), 0.0)
end)

-- Traps and objdump are there on x86-64 processors under Linux.
local able = pcall(function()
  ty.core.probe.steps(function() end, 100)
  local pipe <close> = assert(io.popen "objdump --version 2>/dev/null")
  assert(pipe:read "l")
end)

check.test("one call runs as many additions as its input has numbers", function()
  if not able then return end
  local threads = ty.threads()
  ty.set_threads(1)
  local function additions(n)
    local x, y = ty.randn(n), ty.randn(n)
    local count = 0
    for _, i in ipairs((estimate.trace(function() return x + y end))) do
      local width = i.kind and i.kind:match "^add (%d+)$"
      if width then count = count + tonumber(width) // 32 end
    end
    return count
  end
  check.equal(additions(2048) - additions(1024), 1024)
  check.fails(function() estimate.trace(function() return ty.ones(4096) + 1 end, { most = 10 }) end,
    "estimate.trace: most: expected at least")
  check.fails(function() estimate.trace(function() error("inside", 0) end) end, "inside")
  ty.set_threads(threads)
end)

check.test("a kernel's time is that of its instructions or of its bytes", function()
  if not able then return end
  local machine = { costs = { front = 0.25, width = 512, ghz = 2, kinds = { alu = { latency = 1, rate = 0.25 } },
    shares = {} }, memory = { { bytes = 1 << 14, read = 1e9, write = 5e8 } }, call = 1e-7 }
  local function make(n)
    local x = ty.ones(n)
    return function() return x * 2 end
  end
  local guess = estimate.pipeline.foretell(machine, make, { small = 1024, large = 2048, size = 1 << 16 })
  check.equal({ guess.bytes, guess.bound }, { 8 << 16, "memory" })
  check.close(guess.memory, 4 * 65536 / 1e9 + 4 * 65536 / 5e8, 1e-12)
  check.close(guess.seconds, guess.memory + 1e-7, 1e-12)
  machine.memory[1].read, machine.memory[1].write = 1e15, 1e15
  local other = estimate.pipeline.foretell(machine, make, { small = 1024, large = 2048, size = 1 << 16 })
  check.equal(other.bound, "core")
  check.ok(other.instructions > 65536 / 16 and other.instructions < 65536 * 4, "instructions")
  check.fails(function() estimate.pipeline.foretell(machine, make, { small = 8, large = 8, size = 8 }) end,
    "estimate.pipeline.foretell: large: expected more than small, 8, got 8")
end)

check.test("instructions measured on this machine are within reason", function()
  local ok, measured = pcall(estimate.instructions.measure, { seconds = 1e-5, rounds = 3, pairs = false })
  if not ok then
    check.ok(tostring(measured):find "probe" or tostring(measured):find "estimate.instructions", "says why")
    return
  end
  check.ok(measured.ghz > 0.5 and measured.ghz < 8, ("%.2f GHz"):format(measured.ghz))
  local fma = measured.kinds["fma 256"]
  check.ok(fma.latency > 2 and fma.latency < 12 and fma.rate > 0.2 and fma.rate < 4, "products of f32")
  check.ok(measured.front > 0.05 and measured.front < 1.5, "instructions in a cycle")
end)

check.finish()
