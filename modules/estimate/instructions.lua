--- What a processor's instructions cost: cycles until a result can be used (latency), cycles until the next one of the
-- kind may begin (rate), and which kinds wait for each other (shares), measured by loops that are assembled for the
-- machine at hand. After "Analyzing Modern NVIDIA GPU cores", 2025, arXiv:2503.20481, whose microbenchmarks are of
-- GPUs; the kinds here are those of x86-64.
--
--     local costs = estimate.instructions.measure()
--     print(costs.kinds["fma 512"].latency, costs.kinds["fma 512"].rate, costs.ghz)
--
-- It takes the programs `as` and `ld`.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local M = {}

-- ---- the kinds ----
-- chain: an instruction whose result the next one waits for; many: one of a dozen that do not. R is a vector register's
-- letter, D the number of the one that is written. xmm14 and xmm15 hold ones, xmm13 zeros; rdi is the address of ones.

local three = { chain = "%s %%R15, %%R0, %%R0", many = "%s %%R15, %%R14, %%RD" }
local two = { chain = "%s %%R0, %%R0", many = "%s %%R15, %%RD" }
local imm = { chain = "%s %%R0, %%R0", many = "%s %%R15, %%RD" }

-- Name, form, mnemonic; from how many bits on; needs AVX-512.
local vectors = {
  { "add", three, "vaddps" }, { "multiply", three, "vmulps" }, { "max", three, "vmaxps" },
  { "fma", { chain = "%s %%R15, %%R14, %%R0", many = "%s %%R15, %%R14, %%RD" }, "vfmadd231ps" },
  { "divide", three, "vdivps" }, { "divide f64", three, "vdivpd" }, { "root", two, "vsqrtps" },
  { "root f64", two, "vsqrtpd" }, { "logic", three, "vandps" }, { "integer add", three, "vpaddd" },
  { "integer multiply", three, "vpmulld" }, { "shift", imm, "vpslld $1," }, { "shuffle", imm, "vpermilps $0x1b," },
  { "cross", three, "vpermps", 256 }, { "convert", two, "vcvtdq2ps" }, { "round", imm, "vrndscaleps $0,", 128, true },
  { "scale", three, "vscalefps", 128, true },
  { "widen", { chain = "%s %%H0, %%R0", many = "%s %%H15, %%RD" }, "vcvtph2ps", 256 },
  { "compare", { chain = "%s $1, %%R0, %%R15, %%k1; vblendmps %%R15, %%R14, %%R0{%%k1}",
    many = "%s $1, %%R15, %%R14, %%kM" }, "vcmpps", 128, true },
  { "blend", { chain = "%s %%R15, %%R0, %%R0{%%k1}", many = "%s %%R15, %%R14, %%RD{%%k1}" }, "vblendmps", 128, true },
  { "load", { many = "%s P(%%rdi), %%RD" }, "vmovups" },
  { "broadcast", { many = "%s P(%%rdi), %%RD" }, "vbroadcastss" },
  { "store", { many = "%s %%RD, P(%%rdi)" }, "vmovups" },
  { "gather", { many = "kxnorw %%k1, %%k1, %%k1; %s (%%rdi,%%R13,4), %%RD{%%k1}" }, "vgatherdps", 128, true },
}

local scalars = {
  { "alu", "add %rax, %rax", "add %rax, %N" }, { "multiply integer", "imul %rax, %rax", "imul %rax, %N" },
  { "load scalar", "mov (%rdx), %rdx", "mov P(%rdi), %N" }, { "store scalar", nil, "mov %rax, P(%rdi)" },
  { "branch", nil, "test %rdi, %rdi; jz 9f" },
  -- A little of everything, of which no part is held up by its own kind.
  { "front", nil, "add %rax, %r8; vandps %xmm15, %xmm14, %xmm0; add %rax, %r9; vandps %xmm15, %xmm14, %xmm1; "
    .. "mov (%rdi), %r10; add %rax, %r11; vandps %xmm15, %xmm14, %xmm2" },
  { "mask", "kandw %k1, %k1, %k1", "kandw %k1, %k2, %kM", true },
  { "transfer", "vmovd %xmm0, %eax; vmovd %eax, %xmm0", "vmovd %xmm15, %E" },
  { "divide integer", "xor %edx, %edx; mov $7, %rcx; div %rcx; or $64, %rax",
    "xor %edx, %edx; mov $7, %rcx; div %rcx; or $64, %rax" },
}

-- ---- assembling ----

local letters = { [128] = "xmm", [256] = "ymm", [512] = "zmm" }
local halves = { [256] = "xmm", [512] = "ymm" }
local free = { "r8", "r9", "r10", "r11", "rcx" }
local short = { "r8d", "r9d", "r10d", "r11d", "ecx" }

-- The i-th of a body's instructions, from 0.
local function fill(text, i, width)
  local letter = "%%" .. (letters[width] or "xmm")
  return (text:gsub("%%RD", letter .. i % 12):gsub("%%R", letter)
    :gsub("%%H", "%%" .. (halves[width] or "xmm")):gsub("%%kM", "%%k" .. 2 + i % 6)
    :gsub("%%N", "%%" .. free[1 + i % #free])
    :gsub("%%E", "%%" .. short[1 + i % #short]):gsub("P%(", tostring(i % 12 * 64) .. "("))
end

local unroll = 24

-- A function (char *buffer, long rounds) that runs lines again and again.
local function routine(out, name, lines, ones)
  local function add(text, ...) out[#out + 1] = select("#", ...) > 0 and text:format(...) or text end
  add(".globl %s\n.type %s, @function\n.balign 64\n%s:", name, name, name)
  add "mov $0x3f800000, %eax; vmovd %eax, %xmm15"
  for i = 0, 15 do add(ones .. "%d", i) end
  add "vxorps %xmm13, %xmm13, %xmm13; xor %eax, %eax; mov %rdi, (%rdi); mov %rdi, %rdx"
  if ones:find "zmm" then add "kxnorw %k1, %k1, %k1; kxnorw %k2, %k2, %k2" end
  add ".balign 64\n1:"
  for _, line in ipairs(lines) do add(line) end
  add "dec %rsi; jnz 1b"
  add "9: vzeroupper; ret"
  add(".size %s, . - %s", name, name)
end

-- ---- the machine ----

--- What the processor says that it has, as a set of /proc/cpuinfo's words.
---@return table<string, true>
function M.flags()
  local known, file <close> = {}, io.open "/proc/cpuinfo"
  for line in file and file:lines() or function() end do
    local list = line:match "^flags%s*:(.*)$"
    for flag in (list or ""):gmatch "%S+" do known[flag] = true end
    if list then break end
  end
  return known
end

-- The kinds that the processor has: name, chain and many as texts to fill, width.
local function kinds_of(has)
  local list, wide = {}, has.avx512f and has.avx512dq and has.avx512vl
  for _, width in ipairs { 128, 256, 512 } do
    for _, v in ipairs(vectors) do
      if (wide or width < 512 and not v[5]) and width >= (v[4] or 128) then
        list[#list + 1] = { name = ("%s %d"):format(v[1], width), width = width,
          chain = v[2].chain and v[2].chain:format(v[3]), many = v[2].many:format(v[3]) }
      end
    end
  end
  for _, s in ipairs(scalars) do
    if wide or not s[4] then list[#list + 1] = { name = s[1], chain = s[2], many = s[3] } end
  end
  return list, wide and "vbroadcastss %%xmm15, %%zmm" or "vbroadcastss %%xmm15, %%ymm"
end

--- Makes a library of assembly, in a folder: its path.
---@param folder string
---@param text string
---@return string
function M.assemble(folder, text)
  ty.io.mkdir(folder)
  local source, object, library = folder .. "/kinds.s", folder .. "/kinds.o", folder .. "/kinds.so"
  ty.io.write_atomic(source, text)
  local function run(command)
    local pipe <close> = io.popen(command .. " 2>&1")
    local said = pipe and pipe:read "a" or ""
    if said ~= "" then
      arguments.fail("estimate.instructions: %s: %s", command:match "^%S+", (said:gsub("%s+$", ""):sub(1, 300)))
    end
  end
  run(("as -o '%s' '%s'"):format(object, source))
  run(("ld -shared -z noexecstack -o '%s' '%s'"):format(library, object))
  return library
end

local function temporary()
  local folder = os.tmpname()
  os.remove(folder)
  return folder
end

local function remove(folder)
  for _, ending in ipairs { "s", "o", "so" } do os.remove(("%s/kinds.%s"):format(folder, ending)) end
  os.remove(folder)
end

-- ---- streams ----

local stream = [[
.globl %s
.type %s, @function
.balign 64
%s:
mov (%%rdi), %%r9
vpxor %%xmm0, %%xmm0, %%xmm0
1: mov %%r9, %%rcx
lea 256(%%rdi), %%rdx
.balign 64
2: %s
add $256, %%rdx
dec %%rcx
jnz 2b
dec %%rsi
jnz 1b
vzeroupper
ret
]]

--- Loops that read or write memory from its beginning to its end: time.read(buffer, bytes, rounds) and time.write, in
-- seconds, where buffer is a tensor of 256 bytes more; close() when they are not needed any more.
---@param folder? string
---@return { time: table<string, function>, close: function }
function M.streams(folder)
  local own = folder or temporary()
  local wide = M.flags().avx512f
  local width, letter = wide and 64 or 32, wide and "zmm" or "ymm"
  local lines = { read = {}, write = {} }
  for i = 0, 256 // width - 1 do
    lines.read[i + 1] = ("vmovups %d(%%rdx), %%%s%d"):format(i * width, letter, i + 1)
    lines.write[i + 1] = ("vmovups %%%s0, %d(%%rdx)"):format(letter, i * width)
  end
  local text = ".text\n"
  for name, list in pairs(lines) do
    text = text .. stream:format(name, name, name, table.concat(list, "; "))
  end
  local library = M.assemble(own, text .. ".section .note.GNU-stack,\"\",@progbits\n")
  local time = {}
  for name in pairs(lines) do
    time[name] = function(buffer, bytes, rounds)
      buffer:view("i64"):narrow(0, 0, 1):fill_(bytes // 256)
      return ty.core.probe.time(library, name, rounds, buffer)
    end
  end
  return { time = time, close = function() if not folder then remove(own) end end }
end

-- ---- measuring ----

--- What instructions cost, of instructions.measure.
---@class InstructionCosts
---@field ghz number      cycles of the processor in a nanosecond
---@field width integer   the widest vectors, in bits
---@field front number    cycles that an instruction takes where nothing else holds it up
---@field kinds table<string, { latency: number?, rate: number }>  in cycles
---@field shares table<string, table<string, number>>  of a kind's rate that holds up another kind

-- Of which pairs it is measured whether they wait for each other; kinds of other widths go by the widest.
local paired = { "add", "multiply", "fma", "max", "logic", "integer add", "integer multiply", "shift", "shuffle",
  "cross", "convert", "round", "scale", "compare", "blend", "load", "store", "divide" }

--- Measures them. options: folder (where the loops are assembled; a temporary one), seconds (2e-4: a loop that is
-- timed), rounds (7: times, of which the shortest counts), pairs (true; false: kinds share nothing).
---@param options? table
---@return InstructionCosts
function M.measure(options)
  local who = "estimate.instructions.measure"
  local o = arguments.read(who, options, { folder = arguments.none, seconds = 2e-4, rounds = 7, pairs = true },
    { folder = "a string", seconds = "a finite number > 0", rounds = "an integer >= 1" })
  local kinds, ones = kinds_of(M.flags())
  local widest = ones:find "zmm" and 512 or 256
  local out, runs = { ".text" }, {}
  local function add(name, lines, per_round)
    runs[#runs + 1] = { name = name, per_round = per_round, symbol = ("run%d"):format(#runs + 1) }
    routine(out, runs[#runs].symbol, lines, ones)
  end
  local function body(text, width)
    local lines = {}
    for i = 0, unroll - 1 do lines[i + 1] = fill(text, i, width) end
    return lines
  end
  add("clock", body "add %rax, %rax", unroll) -- what adds a constant takes no time at all on some processors
  local by_name = {}
  for _, kind in ipairs(kinds) do
    by_name[kind.name] = kind
    if kind.chain then add("latency " .. kind.name, body(kind.chain, kind.width), unroll) end
    add("rate " .. kind.name, body(kind.many, kind.width), unroll)
  end
  local pairs_of = {}
  for i, a in ipairs(o.pairs and paired or {}) do
    for j = i + 1, #paired do
      local one, other = by_name[a .. " " .. widest], by_name[paired[j] .. " " .. widest]
      if one and other then
        local lines = {}
        for k = 0, unroll - 1 do
          lines[#lines + 1] = fill(k % 2 == 0 and one.many or other.many, k // 2, widest)
        end
        add(("pair %s+%s"):format(one.name, other.name), lines, unroll // 2)
        pairs_of[#pairs_of + 1] = { one.name, other.name }
      end
    end
  end
  local folder = o.folder or temporary()
  local library = M.assemble(folder, table.concat(out, "\n") .. "\n.section .note.GNU-stack,\"\",@progbits\n")
  local buffer, time, ns = ty.ones(4096), ty.core.probe.time, {}
  for _, run in ipairs(runs) do
    local rounds, best, first = 500, math.huge, math.huge
    for _ = 1, 3 do first = math.min(first, time(library, run.symbol, rounds, buffer)) end
    rounds = math.ceil(rounds * math.max(1, o.seconds / math.max(first, 1e-7))) -- as many as take long enough
    for _ = 1, o.rounds do best = math.min(best, time(library, run.symbol, rounds, buffer)) end
    ns[run.name] = 1e9 * best / rounds / run.per_round
  end
  if not o.folder then remove(folder) end
  local cycle = ns.clock -- one addition waits a cycle for the one before
  local costs = { ghz = 1 / cycle, width = widest, front = ns["rate front"] / cycle / 7, kinds = {}, shares = {} }
  for _, kind in ipairs(kinds) do
    local latency = ns["latency " .. kind.name]
    costs.kinds[kind.name] = { latency = latency and latency / cycle, rate = ns["rate " .. kind.name] / cycle }
  end
  for _, pair in ipairs(pairs_of) do
    local one, other = costs.kinds[pair[1]].rate, costs.kinds[pair[2]].rate
    local both = ns[("pair %s+%s"):format(pair[1], pair[2])] / cycle
    local share = (both - math.max(one, other)) / math.min(one, other)
    share = share < 0.15 and 0 or math.min(1, share)
    for i = 1, 2 do
      costs.shares[pair[i]] = costs.shares[pair[i]] or {}
      costs.shares[pair[i]][pair[3 - i]] = share
    end
  end
  return costs
end

return M
