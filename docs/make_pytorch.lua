-- Writes docs/pytorch.md: what PyTorch's public functions and classes are called here, and why some are not there.
--
--   tycho docs/make_pytorch.lua [--check]
--
-- Their names are those of tests/fixtures/torch_names.json, which tests/fixtures/make_torch_names.py makes. --check
-- writes nothing and fails when the page is out of date; tests/lua/torch_names_test.lua does the same.
local ty = require "tycho"

local here = (arg and arg[0] or "docs/"):match "^(.*/)" or "./"

local renamed = require("tycho.pytorch").renamed

-- Why others are left out: a pattern of names of any module, or of one, and the reason.
local left_out = {
  { "^as_strided", "views by raw strides: slices, permute, unfold and expand cover their uses" },
  { "^empty_strided", "no raw strides" }, { "^empty_permuted", "no raw strides: empty and permute" },
  { "^is_complex", "complex numbers are pairs" }, { "^polar$", "of a matrix: svd gives it, u v and v* s v" },
  { "^fractional", "rarely used; pooling with computed sizes is adaptive pooling" },
  { "^Fractional", "rarely used; pooling with computed sizes is adaptive pooling" },
  { "polynomial", "orthogonal polynomials: a loop of two products" },
  { "^bessel", "of the Bessel functions the modified ones, which models of directions need" },
  { "^spherical_bessel", "of the Bessel functions the modified ones" }, { "^airy", "rarely used" },
  { "^hfft", "spectra of Hermitian signals: irfft2 or irfftn of the conjugate, times the number of points" },
  { "^ihfft", "spectra of Hermitian signals: the conjugate of rfft2 or rfftn, divided by the number of points" },
  { "^ldl", "Cholesky and LU serve" }, { "^lobpcg", "iterative solvers are programs, not ops" },
  { "^geqrf", "raw LAPACK results: qr gives the matrices" }, { "^orgqr", "raw LAPACK results: qr gives the matrices" },
  { "^ormqr", "raw LAPACK results: qr gives the matrices" },
  { "^householder_product", "raw LAPACK results: qr gives the matrices" },
  { "^lu_unpack", "lu gives the matrices" }, { "_lowrank$", "svd of a projection; peft.galore has the projection" },
  { "^scaled_", "products in 8-bit floats" }, { "grouped_mm$", "products of groups: batches serve" },
  { "^SyncBatchNorm", "distributed" }, { "^AdaptiveLogSoftmax", "linear_cross_entropy serves large vocabularies" },
  { "^SparseAdam", "gradients are dense" }, { "^Optional", "a type, no function" },
  { "^histogramdd", "rarely used" }, { "^nextafter", "bits of floats: x:view(\"i32\") has them" },
  { "^frexp", "bits of floats: x:view(\"i32\") has them" }, { "^isreal", "complex numbers are pairs" },
  { "^matrix_sqrth", "of symmetric matrices eigh gives it" }, { "^SyncBatchNorm", "distributed" },
  { "^spsolve", "systems with sparse matrices: direct solvers are libraries of their own" },
  { "^spdiags", "sparse.coo of the diagonals' positions" }, { "^addmm$", "of sparse matrices: a:mm(x) + y" },
  { "^log_softmax$", "of sparse matrices: the logarithm of softmax's values" },
  { "^poisson$", "seeded_noise{kind = \"poisson\"} draws it" },
}

local order = { "torch", "torch.linalg", "torch.fft", "torch.special", "torch.nn.functional", "torch.nn", "torch.optim",
  "torch.optim.lr_scheduler", "torch.sparse" }

local Sparse = getmetatable(ty.sparse.from_dense(ty.ones(1, 1)))

-- Whether a name such as "nn.Bilinear" or "fft" is one of ours, and how it is written.
local function found(module, name)
  local part, rest = name:match "^(%a[%w_]*)%.(.+)$"
  local function has(table_name, t, key)
    local ok, value = pcall(function() return t[key] end)
    return ok and value ~= nil and table_name .. "." .. key or nil
  end
  if part then return has("ty." .. part, ty[part], rest) end
  if module == "torch.sparse" then return has("Sparse", Sparse, name) end
  if module == "torch.nn" then return has("nn", ty.nn, name) or has("ty", ty, name) end
  if module:find "optim" then return has("optim", ty.optim, name) end
  return has("ty", ty, name) or has("nn", ty.nn, name)
    or (ty.core.Tensor.methods[name] and "x:" .. name) or nil
end

local function reason(name)
  for _, row in ipairs(left_out) do
    if name:find(row[1]) then return row[2] end
  end
  return nil
end

local function page(folder)
  local all = ty.io.load_json((folder or here) .. "../tests/fixtures/torch_names.json")
  local lines, total, there, unknown = {}, 0, 0, {}
  for _, module in ipairs(order) do
    local present, missing = {}, {}
    for _, name in ipairs(all.names[module]) do
      total = total + 1
      local other = renamed[module][name]
      local ours = other ~= false and found(module, name) or other and found(module, other)
      if ours then
        there = there + 1
        local own = ours:match "[^.:]+$"
        present[#present + 1] = own == name and ("`%s`"):format(name) or ("`%s` (`%s`)"):format(name, ours)
      else
        local why = reason(name)
        if not why then unknown[#unknown + 1] = module .. "." .. name end
        missing[#missing + 1] = ("| `%s` | %s |"):format(name, why or "not there yet")
      end
    end
    lines[#lines + 1] = ("\n## %s\n\n%d of %d are there. %s\n"):format(module, #present, #present + #missing,
      table.concat(present, ", "))
    if #missing > 0 then
      lines[#lines + 1] = "| left out | why |\n|---|---|\n" .. table.concat(missing, "\n") .. "\n"
    end
  end
  local head = ([[# Coming from PyTorch

Made by docs/make_pytorch.lua. The public functions and classes of PyTorch %s, without what is quantized,
distributed, deprecated, of a backend, of symbolic shapes or a setting of the process, and what they are called here
where that is another name. Dimensions count from 0 as there; options come as a table, `ty.fft(x, { dim = -2 })`;
complex numbers are pairs, the last dimension.

%d of %d (%.0f %%) are there. An error about a name of PyTorch that is not there says what to write.

## What is otherwise

- Lists of Lua count from 1: `model[1]` is the first module of a Sequential, `x.shape[1]` the size of dimension 0,
  which is `x:size(0)` too. Names in `state_dict()` are PyTorch's.
- Methods are called with a colon, `x:relu()`; keywords become a table, `x:sum { dim = 1, keepdim = true }`. Words
  of Lua are no names: `repeat` is `x:tile(2, 1)`, `and`, `or` and `not` of masks are `logical_and`, `&`, `|`, `~`.
- Comparisons are methods, `x:gt(0)`; `==` asks whether two variables are one tensor. `x:max(1)` gives the values
  alone, `x:argmax(1)` where they are; `x:sort(1)` and `x:topk(3)` give both.
- Shapes never change in place: `x = x:unsqueeze(0)`. Fields of tensors are not assigned: `p:requires_grad_(false)`.
- `model:parameters()` is a list, `for _, p in ipairs(model:parameters()) do`; `for name, p in
  model:named_parameters() do`.
- Functions of `torch.nn.functional`, `torch.linalg`, `torch.special` and `torch.fft` are functions of `ty`, losses
  and what belongs to layers of `ty.nn`.
- Layers of sequences are batch first: recurrent ones and attention too. `mask` is true where something is seen, as
  in `scaled_dot_product_attention`; `attn_mask`, `key_padding_mask`, `tgt_mask` and the like are true where it is
  left out.
- Packed sequences are the option `lengths`: `lstm(x, { lengths = lengths })`.
- Schedules are functions of the step: `optim.AdamW(model, { lr = 1e-3, schedule = optim.cosine { steps = 1000 }
  })`, or `optim.Scheduler(optimizer, schedule)` with `:step()`. Gradients are clipped by the option `clip_norm`, or
  `nn.utils.clip_grad_norm_`.
- Batches are tables by name, `batch.image`; a data set is what `data.from_function(count, get)` makes, or any table
  with `#set` and `set:get(i)`.
- `ty.save(path, model:state_dict())` writes safetensors; `train.save_checkpoint` keeps modules, optimizers and
  numbers together. Files of PyTorch are read: `ty.load "model.pt"`.
]]):format(all.version, there, total, 100 * there / total)
  return head .. table.concat(lines), there / total, unknown
end

if arg and arg[0] and arg[0]:find "make_pytorch%.lua$" then
  local text, share, unknown = page()
  local path = here .. "pytorch.md"
  if arg[1] == "--check" then
    local same = ty.io.exists(path) and ty.io.read(path) == text
    if not same then print(path .. " is out of date: tycho docs/make_pytorch.lua") end
    os.exit(same)
  end
  ty.io.write_atomic(path, text)
  print(("wrote %s: %.1f %% are there"):format(path, 100 * share))
  if #unknown > 0 then print("without a reason: " .. table.concat(unknown, " ")) end
end

return page
