-- What the CUDA kernels take of a GPU: registers, shared memory and stack, for each generation that was built.
--
--   tycho bench/resources.lua [FILE...] [--out FILE]
--
-- FILE: the backend's library, or objects of it; left out: build/release/libtycho_cuda.so. --out: left out,
-- bench/results/cuda-resources.txt. Reads with cuobjdump, of the CUDA toolkit: from PATH, or what CUOBJDUMP names.
-- A kernel has a stack where registers are spilled, or where an array is indexed by what is known only as it runs: both
-- are traffic with memory that a hot kernel must not have. Fails when one of those listed here has it.

-- Families that have to run at the speed of the memory or of the tensor cores, for f32, f16 and bf16.
local hot = {
  "^ew_kernel$", "^norm_rows_", "^norm_columns$", "^norm_sum_partial$", "^ch_sum_rows$", "^ch_sum_columns$",
  "^ch_apply$", "^softmax_", "^loss_rows$", "^loss_backward$", "^reduce_kernel$", "^reduce_splits$", "^glu_gradients$",
  "^rotate$", "^draw$", "^sum_runs$", "^radix_", "^step_many$", "^adam_coded$", "^at_", "^mm_tiles$", "^conv_tiles$",
  "^weight_tiles$",
}
-- Of these only what computes with f32 counts: other types are not what models are made of. sin, cos and tan of large
-- numbers index the digits of pi. at_forward has halves only of such widths as tensor cores cannot take.
local cold = {
  "double", "long", "short", "int", "char", "_f64", "_i64", "reduce_integers", "reduce_bits", "sin_f32", "cos_f32",
  "tan_f32", "at_forward<ty_",
}

local function fail(format, ...)
  io.stderr:write("resources: ", format:format(...), "\n")
  os.exit(1)
end

local function quoted(text) return "'" .. text:gsub("'", "'\\''") .. "'" end

local function output_of(command)
  local pipe = assert(io.popen(command, "r"))
  local text = pipe:read "a"
  if not pipe:close() then fail("%s failed", command) end
  return text
end

-- "void (anonymous namespace)::f<(int)4, float>(job<float>)": the name "f<4, float>".
local function plain_name(name)
  name = name:gsub("%(anonymous namespace%)::", ""):gsub("%((%a[%w ]*)%)(%-?%d)", "%2"):gsub("^%s*void%s+", "")
  local depth, stop = 0, #name
  for i = 1, #name do
    local c = name:sub(i, i)
    if c == "<" then depth = depth + 1 end
    if c == ">" then depth = depth - 1 end
    if c == "(" and depth == 0 then
      stop = i - 1
      break
    end
  end
  return name:sub(1, stop)
end

local function is_hot(family, name)
  for _, word in ipairs(cold) do
    if name:find(word, word:find "<" and 1 or #family, true) then return false end
  end
  for _, pattern in ipairs(hot) do
    if family:find(pattern) then return true end
  end
  return false
end

local files, out = {}, "bench/results/cuda-resources.txt"
do
  local i = 1
  while arg[i] do
    if arg[i] == "--out" then
      i = i + 1
      out = arg[i] or fail "--out: expected a file"
    else
      files[#files + 1] = arg[i]
    end
    i = i + 1
  end
  if #files == 0 then files[1] = "build/release/libtycho_cuda.so" end
end

-- arches[name][kernel] = { registers =, shared =, stack = }
local arches = {}
local tool = os.getenv "CUOBJDUMP" or "cuobjdump"
for _, file in ipairs(files) do
  local arch, kernel
  for line in output_of(quoted(tool) .. " --dump-resource-usage " .. quoted(file) .. " | c++filt"):gmatch "[^\n]+" do
    arch = line:match "^arch = (%S+)" or arch
    local name = line:match "^%s*Function (.*):$"
    if name then
      kernel = { name = plain_name(name) }
    elseif line:find "REG:" and kernel and arch then
      kernel.registers = tonumber(line:match "REG:(%d+)")
      kernel.shared = tonumber(line:match "SHARED:(%d+)")
      kernel.stack = tonumber(line:match "STACK:(%d+)") + tonumber(line:match "LOCAL:(%d+)")
      arches[arch] = arches[arch] or {}
      arches[arch][kernel.name] = kernel
    end
  end
end
if not next(arches) then fail("no kernels in %s", table.concat(files, ", ")) end

local function sorted_keys(t)
  local keys = {}
  for key in pairs(t) do keys[#keys + 1] = key end
  table.sort(keys)
  return keys
end

local lines, bad = {}, {}
local function write(format, ...) lines[#lines + 1] = format:format(...) end

write "CUDA kernels: the most registers, bytes of static shared memory and of stack in each family; what has a stack."
for _, arch in ipairs(sorted_keys(arches)) do
  local kernels, families, stacks = arches[arch], {}, {}
  for _, name in ipairs(sorted_keys(kernels)) do
    local kernel, family = kernels[name], name:match "^[^<]+"
    local f = families[family] or { count = 0, registers = 0, shared = 0, stack = 0 }
    families[family] = f
    f.count = f.count + 1
    for _, what in ipairs { "registers", "shared", "stack" } do f[what] = math.max(f[what], kernel[what]) end
    if kernel.stack > 0 then
      local is = is_hot(family, name)
      stacks[#stacks + 1] = ("  %-5d %s%s"):format(kernel.stack, name, is and "  (hot)" or "")
      if is then bad[#bad + 1] = ("%s: %s has %d bytes of stack"):format(arch, name, kernel.stack) end
    end
  end
  write("\n%s\n%-32s %7s %9s %6s %5s", arch, "family", "kernels", "registers", "shared", "stack")
  for _, family in ipairs(sorted_keys(families)) do
    local f = families[family]
    write("%-32s %7d %9d %6d %5d", family, f.count, f.registers, f.shared, f.stack)
  end
  write("\nwith a stack: %d\n%s", #stacks, table.concat(stacks, "\n"))
end

local to = io.open(out, "w") or fail("cannot write %s", out)
to:write(table.concat(lines, "\n"), "\n")
to:close()
if #bad > 0 then fail("hot kernels with a stack:\n%s", table.concat(bad, "\n")) end
print(("%s: no hot kernel has a stack"):format(out))
