-- PyTorch's zip checkpoints, written by torch.save (tests/fixtures/make_torch.py), and files that want to do harm.
local check = dofile((arg[0]:match(".*/") or "./") .. "check.lua")
local ty = require "tycho"
local scratch = dofile((arg[0]:match(".*/") or "./") .. "scratch.lua")

local fixtures = check.root .. "tests/fixtures/io/"

local function ramp(dtype)
  local t = ty.arange(24, { dtype = "f32" }):reshape(2, 3, 4)
  return dtype == "bool" and t:ne(0) or t:to(dtype or "f32")
end

check.test("every dtype, views and shared storages", function()
  for _, mmap in ipairs { true, false } do
    local state = ty.io.load_torch(fixtures .. "torch_state.pt", { mmap = mmap })
    for _, dtype in ipairs { "f64", "f32", "f16", "bf16", "i64", "i32", "i16", "i8", "u8", "bool" } do
      check.equal(state[dtype].dtype, dtype)
      check.equal(state[dtype]:tolist(), ramp(dtype):tolist(), dtype)
    end
    check.equal(state.turned:tolist(), ramp():permute(2, 0, 1):tolist())
    check.equal(state.part:tolist(), ramp()[":, 1:, 1:3"]:tolist())
    check.equal(state.repeated:tolist(), { { 1, 1, 1 }, { 2, 2, 2 } })
    check.equal(state.scalar:item(), 2.5)
    check.equal(state.empty.shape, { 0, 5 })
    check.equal(state.parameter:tolist(), ramp():select(0, 0):tolist())
    state.f32:fill_(7)
    check.equal(state.tied:max():item(), 7, "what was shared in the file is shared")
    check.equal(state.turned:min():item(), 7)
    check.equal(state.f64:max():item(), 23)
  end
  check.equal(ty.io.load(fixtures .. "torch_state.pt").f32:tolist(), ramp():tolist(), "the file was not written to")
end)

check.test("nested dictionaries, numbers and text", function()
  local tensors, notes = ty.io.load_torch(fixtures .. "torch_nested.pt")
  check.close(tensors["model.0.weight"]:tolist(), { { 0, 1, 2 }, { 3, 4, 5 } }, 1e-4)
  check.equal(tensors["model.1.num_batches_tracked"]:item(), 1)
  check.equal(tensors["optimizer.state.0.exp_avg"].shape, { 2, 3 })
  check.equal(notes.epoch, "3")
  check.equal(notes.big, tostring(1 << 40))
  check.equal(notes.loss, "-0.25")
  check.equal(notes.name, "a näme")
  check.equal(notes.flag, "true")
  check.equal(notes.nothing, nil)
  check.equal(notes["pair.0"] .. notes["pair.1"], "1-2")
  check.equal(notes["optimizer.param_groups.0.lr"], "0.001")
end)

check.test("nothing is run, and what is refused is named", function()
  check.fails(function() ty.io.load_torch(fixtures .. "torch_harmful.pt") end, '"system" of module "posix"')
  check.fails(function() ty.io.load_torch(fixtures .. "torch_module.pt") end, '"Sequential" of module')
  check.fails(function() ty.io.load_torch(fixtures .. "torch_legacy.pt") end, "format before 1.6")
  check.fails(function() ty.io.load_torch(fixtures .. "torch_protocol4.pt") end, "protocol 4")
  check.fails(function() ty.io.load_torch(fixtures .. "stored.npz") end, "without data.pkl")
  check.equal(ty.io.stat "harmed", nil)
end)

check.test("every cut and many changed bytes are an error or a table, never a crash", function()
  local text = scratch.slurp(fixtures .. "torch_nested.pt")
  local function try(bytes)
    local ok, result = pcall(ty.io.load_torch, scratch.spit("damaged.pt", bytes))
    check.ok(ok or type(result) == "string", "an error has a text")
    return ok
  end
  for size = 0, #text - 1, 37 do check.ok(not try(text:sub(1, size)), "cut at " .. size) end
  for at = 1, #text, 5 do
    try(text:sub(1, at - 1) .. string.char((text:byte(at) + 1 + at % 250) % 256) .. text:sub(at + 1))
  end
end)

scratch.clean()
check.finish()
