--- The instructions that the library runs for one call, in order: addresses by the processor's trap flag, what they are
-- by `objdump`.
--
--     local list = estimate.trace(function() x:add(y) end)      -- { name = "vaddps", kind = "add 512", ... }, ...
local ty = require "tycho"
local arguments = require "tycho.arguments"

local probe = ty.core.probe

-- ---- what an instruction is ----

-- Beginnings of mnemonics, tried in order: the kind, without the width where it is a vector's.
local kinds = {
  { "vfn?m[as]", "fma" }, { "vdp", "fma" }, { "vmul", "multiply" }, { "vadd", "add" }, { "vsub", "add" },
  { "vmax", "max" }, { "vmin", "max" }, { "vdiv[ps]s", "divide" }, { "vdiv[ps]d", "divide f64" },
  { "vsqrt[ps]s", "root" }, { "vsqrt[ps]d", "root f64" }, { "vrsqrt", "multiply" }, { "vrcp", "multiply" },
  { "vcmp", "compare" }, { "vpcmp", "compare" }, { "vptest", "compare" }, { "vfpclass", "compare" },
  { "vu?comis", "compare" }, { "vpmull", "integer multiply" }, { "vpmul", "integer multiply" },
  { "vpmadd", "integer multiply" }, { "vps[lr][lar]", "shift" }, { "vpro", "shift" }, { "vblend", "blend" },
  { "vpblend", "blend" }, { "vpermt2", "cross" }, { "vpermi2", "cross" }, { "vpermilp", "shuffle" },
  { "vperm", "cross" }, { "vpexpand", "cross" }, { "vpcompress", "cross" }, { "vextract", "cross" },
  { "vinsert", "cross" }, { "vunpck", "shuffle" }, { "vpunpck", "shuffle" }, { "vshuf[fi]", "cross" },
  { "vshuf", "shuffle" }, { "vpshuf", "shuffle" }, { "vpack", "shuffle" }, { "vpalign", "shuffle" },
  { "valign", "cross" }, { "vmovhl", "shuffle" }, { "vmovlh", "shuffle" }, { "vmovs[hl]dup", "shuffle" },
  { "vmovddup", "shuffle" }, { "vcvtp[hs]2p[hsd]", "widen" }, { "vcvtpd2ps", "widen" }, { "vpmov[sz]x", "widen" },
  { "vpmov", "widen" }, { "vcvt.*si", "transfer" }, { "vcvt", "convert" }, { "vrnd", "round" }, { "vround", "round" },
  { "vreduce", "round" }, { "vscalef", "scale" }, { "vgetexp", "scale" }, { "vgetmant", "scale" },
  { "vfixup", "scale" }, { "vrange", "max" }, { "v?p?gather", "gather" }, { "vgather", "gather" },
  { "vpgather", "gather" }, { "vbroadcast", "broadcast" }, { "vpbroadcast", "broadcast" }, { "vmov[dq]$", "transfer" },
  { "vpextr", "transfer" }, { "vpinsr", "transfer" }, { "vmov", "move" }, { "vpadd", "integer add" },
  { "vpsub", "integer add" }, { "vp?max", "integer add" }, { "vpmin", "integer add" }, { "vpabs", "integer add" },
  { "vp?and", "logic" }, { "vp?or", "logic" }, { "vp?xor", "logic" }, { "vptern", "logic" }, { "vzero", "none" },
  { "prefetch", "prefetch" }, { "kmov", "transfer" }, { "k", "mask" }, { "imul", "multiply integer" },
  { "mul", "multiply integer" }, { "i?div", "divide integer" }, { "nop", "none" }, { "endbr", "none" },
  { "lea", "alu" }, { "j", "branch" }, { "call", "branch" }, { "ret", "branch" }, { "push", "store scalar" },
  { "pop", "load scalar" }, { "mov", "move" },
}
local scalar = { alu = true, branch = true, none = true, mask = true, transfer = true, prefetch = true,
  ["multiply integer"] = true, ["divide integer"] = true, ["store scalar"] = true, ["load scalar"] = true }

local function kind_of(name)
  for _, row in ipairs(kinds) do
    if name:find("^" .. row[1]) then return row[2] end
  end
  return "alu"
end

-- One name for all parts of a register: "v3" for xmm3 and zmm3, "rax" for eax and al.
local wide = { ah = "rax", bh = "rbx", ch = "rcx", dh = "rdx" }
for _, letter in ipairs { "a", "b", "c", "d" } do
  wide["e" .. letter .. "x"], wide[letter .. "x"], wide[letter .. "l"] = "r" .. letter .. "x", "r" .. letter .. "x",
    "r" .. letter .. "x"
end
for _, name in ipairs { "si", "di", "sp", "bp" } do
  wide["e" .. name], wide[name], wide[name .. "l"] = "r" .. name, "r" .. name, "r" .. name
end

local function register(text)
  local vector = text:match "^[xyz]mm(%d+)"
  if vector then return "v" .. vector end
  local numbered = text:match "^(r%d+)[dwb]?$"
  return numbered or wide[text] or text:match "^r[a-ds][xipb]$" or text:match "^k%d$"
end

local bits = { x = 128, y = 256, z = 512 }

-- Operands of a text, which commas part outside of brackets.
local function operands(text)
  local list = {}
  local depth, from = 0, 1
  for i = 1, #text do
    local c = text:sub(i, i)
    if c == "[" or c == "{" then depth = depth + 1 elseif c == "]" or c == "}" then depth = depth - 1 end
    if c == "," and depth == 0 then
      list[#list + 1] = text:sub(from, i - 1)
      from = i + 1
    end
  end
  if from <= #text then list[#list + 1] = text:sub(from) end
  return list
end

--- An instruction in Intel's notation, as objdump writes it: { name, kind, reads, writes, load, store }: kind as in
-- estimate.instructions, nil for what only moves between registers or memory; reads and writes are lists of registers
-- ("flags" is one); load and store are kinds too.
---@param text string  "vaddps zmm0,zmm1,ZMMWORD PTR [rdi+rax*4]"
---@return table
local function decode(text)
  local name, rest = text:match "^(%S+)%s*(.-)%s*$"
  while name == "rep" or name == "lock" or name == "bnd" or name == "notrack" or name == "repz" or name == "repnz" or
    name == "cs" or name == "data16" or name == "ds" do
    name, rest = rest:match "^(%S+)%s*(.-)%s*$"
  end
  rest = (rest or ""):gsub("%s*#.*$", ""):gsub("%s*<.*>$", "")
  -- Without a leading v they are the same, on the destination.
  local older = not name:find "^v" and rest:find "xmm%d" ~= nil
  local kind, width = kind_of(older and "v" .. name or name), 0
  for letter in rest:gmatch "([xyz])mm%d" do width = math.max(width, bits[letter]) end
  local i = { name = name, reads = {}, writes = {} }
  local list = operands(rest)
  local function read(operand)
    for part in operand:gmatch "[%a%d]+" do
      local r = register(part)
      if r then i.reads[#i.reads + 1] = r end
    end
  end
  local memory
  for at, operand in ipairs(list) do
    local inside = operand:match "%[(.*)%]"
    if inside then
      memory = at
      read(inside)
    end
    local mask = operand:match "{(k%d)}"
    if mask then i.reads[#i.reads + 1] = mask end
  end
  local compares = not older and name:find "^cmp" or name:find "^test" or
    name:find "^v?u?comis" or name:find "^vptest$" or
    name:find "^kortest" or name:find "^ktest"
  local first = list[1]
  local destination = first and not first:find "%[" and register(first:match "^[%a%d]+" or "")
  -- What is read besides sources: the destination of fused products, of what merges by a mask, of two operands.
  local merges = first and first:find "{k%d}" and not first:find "{z}"
  local two = name:sub(1, 1) ~= "v" and name:sub(1, 1) ~= "k" and not name:find "^mov" and name ~= "lea" and
    not name:find "^set" and not (name == "imul" and #list == 3) and
    not (older and (name:find "^sqrt" or name:find "^cvt" or name:find "^pshuf"))
  if destination then
    if compares or two or merges or name:find "^vfn?m[as]" or name:find "^vdp" or name:find "^vpdp" or
      name:find "^vpermi2" or name:find "^vpermt2" or name:find "^vptern" or name:find "^vfixup" then
      i.reads[#i.reads + 1] = destination
    end
    if not compares and kind ~= "branch" and name ~= "push" then i.writes[1] = destination end
  end
  for at = 2, #list do
    if at ~= memory then read((list[at]:gsub("{.*}", ""))) end
  end
  if memory == 1 and #list == 1 then read(first:match "%[(.*)%]") end
  if kind == "alu" or compares or kind == "multiply integer" then
    if name ~= "lea" and name ~= "not" and not name:find "^set" and not name:find "^cmov" then
      i.writes[#i.writes + 1] = "flags"
    end
    if name:find "^set" or name:find "^cmov" or name == "adc" or name == "sbb" then i.reads[#i.reads + 1] = "flags" end
  end
  if kind == "branch" and name:find "^j" and name ~= "jmp" then i.reads[#i.reads + 1] = "flags" end
  -- The same register twice makes zeros (or ones) of anything.
  if (name:find "xor" or name:find "^vpsub" or name == "sub" or name:find "^vpcmpeq") and #list >= 2 and not memory and
    list[#list] == list[#list - 1] then
    i.reads, i.writes = {}, destination and { destination } or {}
    kind = "none"
  end
  local sized = width > 0 and " " .. width or nil
  if memory and kind ~= "prefetch" and name ~= "lea" and kind ~= "none" then
    local writes = memory == 1 and not compares and kind ~= "branch" and name ~= "push"
    if writes then i.store = sized and "store" .. sized or "store scalar" end
    if not writes or two and not name:find "^mov" then
      if kind == "broadcast" then
        i.load, kind = "broadcast" .. (sized or " 128"), "move"
      elseif kind ~= "gather" then
        i.load = sized and "load" .. sized or "load scalar"
      end
    end
    if writes and (kind == "transfer" or kind == "cross" and not name:find "^vextract") then kind = "move" end
  elseif kind == "prefetch" then
    i.load = "load scalar"
  elseif kind == "broadcast" then
    kind = "cross"
  end
  if kind == "transfer" and i.load then kind = "move" end
  if kind ~= "move" and kind ~= "none" and kind ~= "prefetch" and kind ~= "load scalar" and kind ~= "store scalar" then
    i.kind = scalar[kind] and kind or kind .. (sized or " 128")
  elseif kind == "load scalar" then
    i.load = "load scalar"
  elseif kind == "store scalar" then
    i.store = "store scalar"
  end
  i.gone = kind == "move" and not i.load and not i.store -- renamed
  return i
end

-- ---- what is at an address ----

-- Texts of the instructions at addresses of a file: { [address] = text }.
local function disassemble(path, addresses)
  table.sort(addresses)
  local texts, from = {}, 1
  for k = 1, #addresses do
    if k == #addresses or addresses[k + 1] - addresses[k] > 4096 then
      local command = ("objdump -d -w -M intel --no-show-raw-insn --start-address=%d --stop-address=%d '%s' 2>&1")
        :format(addresses[from], addresses[k] + 16, path)
      local pipe <close> = io.popen(command)
      for line in pipe and pipe:lines() or function() end do
        local address, text = line:match "^%s*(%x+):%s+(.+)$"
        if address then texts[tonumber(address, 16)] = text end
      end
      from = k + 1
    end
  end
  return texts
end

local known = {} -- by address: what was decoded before

--- The instructions of the library that fn() runs on this thread, one after the other, decoded. options: most
-- (500,000: more than that is an error).
---@param fn function
---@param options? { most?: integer }
---@return table[] list    of what decode gives; the same table wherever the same address comes again
---@return integer[] addresses
local function trace(fn, options)
  local who = "estimate.trace"
  arguments.expect(who, "fn", fn, "a function")
  local o = arguments.read(who, options, { most = 500000 }, { most = "an integer >= 1" })
  local addresses, lost = probe.steps(fn, o.most)
  if lost > 0 then arguments.fail("%s: most: expected at least %d, got %d", who, o.most + lost, o.most) end
  local files, news = {}, {}
  for _, at in ipairs(addresses) do
    if not known[at] and not news[at] then
      local path, offset = probe.where(at)
      news[at] = { path, offset }
      files[path] = files[path] or {}
      table.insert(files[path], offset)
    end
  end
  local texts = {}
  for path, offsets in pairs(files) do texts[path] = disassemble(path, offsets) end
  for at, place in pairs(news) do
    local text = texts[place[1]][place[2]]
    if not text then arguments.fail("%s: objdump says nothing of address %#x in %s", who, place[2], place[1]) end
    known[at] = decode(text)
  end
  local list = {}
  for k, at in ipairs(addresses) do list[k] = known[at] end
  return list, addresses
end

return { trace = trace, decode = decode }
